/* What programs rely on and smaller drivers get wrong: handles returned twice, memory of the host, several allocations
   side by side, pages of small allocations, functions of newer releases, forked processes and handlers of atexit. */
#define _GNU_SOURCE
#include "common.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static size_t unit;
static CUmemAllocationProp prop;
static CUmemAccessDesc device_access;

static CUdeviceptr reserve(size_t bytes) {
    CUdeviceptr address;
    CALL(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    return address;
}

static CUmemGenericAllocationHandle map_at(CUdeviceptr address, size_t bytes) {
    CUmemGenericAllocationHandle handle;
    CALL(cuMemCreate(&handle, bytes, &prop, 0));
    CALL(cuMemMap(address, bytes, 0, handle, 0));
    return handle;
}

/* The handle of mapped memory is the one it was mapped with, and takes a release for each time it was given out. */
static void handles(void) {
    CUdeviceptr address = reserve(unit);
    CUmemGenericAllocationHandle handle = map_at(address, unit), again = 0, later = 0;
    CALL(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(address + 100)));
    CHECK(again == handle);
    CALL(cuMemRelease(handle));
    CALL(cuMemRelease(handle));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemRelease(handle));
    /* The mapping still has it. */
    CALL(cuMemRetainAllocationHandle(&later, (void *)(uintptr_t)address));
    CHECK(later == handle);
    CALL(cuMemRelease(later));
    CALL(cuMemUnmap(address, unit));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemRetainAllocationHandle(&later, (void *)(uintptr_t)address));
    CALL(cuMemAddressFree(address, unit));
}

static void host_memory(void) {
    CUmemAllocationProp host = prop;
    CUmemAllocationProp got;
    CUmemAccessDesc access = device_access;
    CUmemGenericAllocationHandle handle;
    unsigned long long flags = 9;
    int value = 0, fd = -1;
    CHECK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 0) == CUDA_SUCCESS && value == 0);
    CHECK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0) == CUDA_SUCCESS && value == 1);
    host.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&handle, unit, &host, 0));
    host.location.type = CU_MEM_LOCATION_TYPE_HOST;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&handle, unit, &host, 0));
    host.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    host.location.id = 999;
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuMemCreate(&handle, unit, &host, 0));

    size_t before, after, total, bytes;
    CALL(cuMemGetInfo(&before, &total));
    for (int node = 0; node < 2; node++) {
        host.location.type = node ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_HOST;
        host.location.id = 0;
        host.requestedHandleTypes = node ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0;
        CALL(cuMemGetAllocationGranularity(&bytes, &host, 0));
        CALL(cuMemCreate(&handle, bytes, &host, 0));
        CALL(cuMemGetAllocationPropertiesFromHandle(&got, handle));
        CHECK(got.location.type == host.location.type);
        CUdeviceptr address = reserve(bytes);
        CALL(cuMemMap(address, bytes, 0, handle, 0));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(address, 1, 1));
        CALL(cuMemSetAccess(address, bytes, &device_access, 1));
        access.location.type = node ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_HOST;
        CALL(cuMemGetAccess(&flags, &access.location, address));
        CHECK(flags == 0);
        CALL(cuMemSetAccess(address, bytes, &access, 1));
        CALL(cuMemGetAccess(&flags, &access.location, address));
        CHECK(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        /* The CPU, the device and the driver see the same bytes. */
        volatile int *words = (volatile int *)(uintptr_t)address;
        words[3] = 30;
        CALL(cuMemsetD32(address, 7, 2));
        int back[4] = {0};
        CALL(cuMemcpyDtoH(back, address, sizeof back));
        CHECK(words[1] == 7 && back[1] == 7 && back[3] == 30);
        CALL(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address + 5));
        CHECK(value == CU_MEMORYTYPE_HOST);
        CUdeviceptr base = 0;
        size_t size = 0;
        CALL(cuMemGetAddressRange(&base, &size, address + 5));
        CHECK(base == address && size == bytes);
        EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuMemGetHandleForAddressRange(&fd, address, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
        if (node) {
            CUmemGenericAllocationHandle imported;
            CALL(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
            CALL(cuMemImportFromShareableHandle(&imported, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
            CALL(cuMemGetAllocationPropertiesFromHandle(&got, imported));
            CHECK(got.location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA);
            CALL(cuMemRelease(imported));
            close(fd);
        } else {
            access.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
            EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(address, bytes, &access, 1));
        }
        CALL(cuMemUnmap(address, bytes));
        CALL(cuMemAddressFree(address, bytes));
        CALL(cuMemRelease(handle));
    }
    CALL(cuMemGetInfo(&after, &total));
    CHECK(after == before);
    /* The CPU has no access to the device's memory. */
    CUdeviceptr address = reserve(unit);
    handle = map_at(address, unit);
    access.location.type = CU_MEM_LOCATION_TYPE_HOST;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(address, unit, &access, 1));
    CALL(cuMemUnmap(address, unit));
    CALL(cuMemAddressFree(address, unit));
    CALL(cuMemRelease(handle));
}

/* A dma-buf over three allocations side by side, as PyTorch's expandable segments are, and ranges that are none. */
static void segments(void) {
    long page = sysconf(_SC_PAGESIZE);
    CUresult (*attach)(CUdeviceptr *, int, uint64_t, size_t) = dlsym(RTLD_DEFAULT, "cuSoftGpuAttachDmaBuf");
    CUdeviceptr start = reserve(5 * unit), at = 0;
    CUmemGenericAllocationHandle parts[3];
    for (int i = 0; i < 3; i++)
        parts[i] = map_at(start + (size_t)i * unit, unit);
    CALL(cuMemSetAccess(start, 3 * unit, &device_access, 1));
    CUdeviceptr from = start + unit - (size_t)page;
    size_t bytes = unit + 2 * (size_t)page;
    int fd = -1, other = -1;
    CALL(cuMemGetHandleForAddressRange(&fd, from, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    CHECK(attach && attach(&at, fd, 8, bytes - 8) == CUDA_SUCCESS && at == from + 8);
    CHECK(attach(&at, fd, 8, bytes - 7) == CUDA_ERROR_INVALID_VALUE);
    CHECK(lseek(fd, 0, SEEK_CUR) == 0 && mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    /* A copy crosses the borders. */
    char *host = malloc(bytes);
    memset(host, 0x3c, bytes);
    CALL(cuMemcpyHtoD(from, host, bytes));
    memset(host, 0, bytes);
    CALL(cuMemcpyDtoH(host, from, bytes));
    CHECK(host[0] == 0x3c && host[page] == 0x3c && host[bytes - 1] == 0x3c);
    free(host);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemGetHandleForAddressRange(&other, from, 3 * unit, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    CALL(cuMemUnmap(start + unit, unit));
    CALL(cuMemRelease(parts[1]));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemGetHandleForAddressRange(&other, from, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    CHECK(attach(&at, fd, 0, bytes) == CUDA_ERROR_INVALID_VALUE);
    close(fd);
    /* All allocations of a range have the same properties. */
    CUmemAllocationProp usual = prop;
    prop.requestedHandleTypes = 0;
    parts[1] = map_at(start + unit, unit);
    prop = usual;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemGetHandleForAddressRange(&other, from, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    CALL(cuMemUnmap(start, 3 * unit));
    for (int i = 0; i < 3; i++)
        CALL(cuMemRelease(parts[i]));
    CALL(cuMemAddressFree(start, 5 * unit));
}

/* Small allocations are parts of larger blocks, so the driver knows their pages. */
static void pages(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    CUdeviceptr small[12];
    int inside = -1;
    for (int i = 0; i < 12; i++) {
        CALL(cuMemAlloc(&small[i], 64));
        CHECK(small[i] % 512 == 0);
        if (small[i] % page)
            inside = i;
    }
    CHECK(inside > 0);
    CUdeviceptr first = small[inside] / page * page, base = 0;
    size_t size = 0;
    int type = 0, ordinal = -1, fd = -1;
    int numbers[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 9};
    void *values[] = {&type, &ordinal};
    /* A byte of the page that no allocation has: between two of them. */
    CUdeviceptr gap = small[inside] + 512;
    EXPECT(CUDA_ERROR_NOT_FOUND, cuMemGetAddressRange(&base, &size, gap));
    CUdeviceptr places[] = {first, gap, first + page - 1};
    for (int i = 0; i < 3; i++) {
        type = ordinal = -1;
        CALL(cuPointerGetAttributes(2, numbers, values, places[i]));
        CHECK(type == CU_MEMORYTYPE_DEVICE && ordinal == 0);
        CALL(cuPointerGetAttribute(&base, 11, places[i]));
        CALL(cuPointerGetAttribute(&size, 12, places[i]));
        CHECK(base <= places[i] && places[i] < base + size);
    }
    CALL(cuMemGetHandleForAddressRange(&fd, first, page, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    close(fd);
    /* A kernel or copy may still touch only what is allocated. */
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(gap, 1, 1));
    for (int i = 0; i < 12; i++)
        CALL(cuMemFree(small[i]));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, first));
}

/* The attribute belongs to memory from cuMemAlloc. */
static void synchronous_operations(void) {
    CUdeviceptr plain, pooled, mapped = reserve(unit);
    CUmemGenericAllocationHandle handle = map_at(mapped, unit);
    unsigned one = 1, none = 0, value = 9;
    void *pinned;
    CALL(cuMemAlloc(&plain, 64));
    CALL(cuMemAllocAsync(&pooled, 64, NULL));
    CALL(cuMemHostAlloc(&pinned, 64, 0));
    CALL(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, plain));
    CHECK(value == 0);
    CALL(cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, plain + 3));
    CALL(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, plain));
    CHECK(value == 1);
    CALL(cuPointerSetAttribute(&none, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, plain));
    CALL(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, plain));
    CHECK(value == 0);
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, mapped));
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, pooled));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, (CUdeviceptr)(uintptr_t)pinned));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, plain));
    CALL(cuMemFreeHost(pinned));
    CALL(cuMemFree(pooled));
    CALL(cuMemFree(plain));
    CALL(cuMemUnmap(mapped, unit));
    CALL(cuMemRelease(handle));
    CALL(cuMemAddressFree(mapped, unit));
}

/* Returns whether the function of a release is the exported one of this name. */
static int finds(const char *name, int version, const char *exported) {
    void *function = NULL;
    int status = -1;
    CUresult result = cuGetProcAddress(name, &function, version, 0, &status);
    return result == CUDA_SUCCESS && status == 0 && function && function == dlsym(RTLD_DEFAULT, exported);
}

static void releases(void) {
    int driver = 0;
    CALL(cuDriverGetVersion(&driver));
    /* A program of a newer release gets what the driver has. */
    CHECK(driver >= 13000 || (finds("cuCtxGetDevice", 13000, "cuCtxGetDevice") && finds("cuCtxSynchronize", 13010, "cuCtxSynchronize")));
    CHECK(finds("cuMemAlloc", 99000, "cuMemAlloc_v2"));
    CHECK(finds("cuLaunchHostFunc", 12080, "cuLaunchHostFunc"));
    CHECK(finds("cuStreamGetCtx", 12040, "cuStreamGetCtx") && finds("cuStreamGetCtx", 12080, "cuStreamGetCtx_v2"));
    CHECK(finds("cuStreamGetCaptureInfo", 12080, "cuStreamGetCaptureInfo_v3"));
}

/* A forked process doesn't have the driver that its parent initialized. */
static void forked(CUcontext context) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        failures = 0;
        CUdeviceptr address = 0;
        CUstream stream;
        CUevent event;
        CUmodule module;
        size_t size;
        int value = 0;
        const char *name;
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuInit(0));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&value));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGet(&value, 0));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCtxGetCurrent(&context));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCtxSetCurrent(context));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCtxDestroy(context));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCtxSynchronize());
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDevicePrimaryCtxRetain(&context, 0));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc(&address, 64));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuMemFree(address));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuMemGetInfo(&size, &size));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuMemRelease(1));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuStreamCreate(&stream, 0));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuEventCreate(&event, 0));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuModuleLoadData(&module, ""));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuMemAllocManaged(&address, 64, 1));
        EXPECT(CUDA_SUCCESS, cuDriverGetVersion(&value));
        EXPECT(CUDA_SUCCESS, cuGetErrorName(CUDA_ERROR_NOT_INITIALIZED, &name));
        fflush(stdout);
        _exit(failures);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CALL(cuCtxSynchronize());
}

/* When this runs, the main thread's own data is gone, and with it the current context. */
static void at_exit(void) {
    CUcontext context;
    CUdeviceptr address;
    CUresult results[] = {cuCtxGetCurrent(&context), cuMemAlloc(&address, 64), cuCtxSynchronize(), cuCtxPopCurrent(&context)};
    int good = 1;
    for (int i = 0; i < 4; i++)
        good = good && (results[i] == CUDA_SUCCESS || results[i] == CUDA_ERROR_DEINITIALIZED);
    printf("%s at exit: %s\n", good ? "ok" : "FAILED", name_of(results[1]));
    fflush(stdout);
    if (!good)
        _exit(100);
}

int main(void) {
    CUcontext context;
    atexit(at_exit);
    CALL(cuInit(0));
    CALL(cuCtxCreate(&context, 0, 0));
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location.type = device_access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.allocFlags.gpuDirectRDMACapable = 1;
    device_access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CALL(cuMemGetAllocationGranularity(&unit, &prop, 0));
    handles();
    host_memory();
    segments();
    pages();
    synchronous_operations();
    releases();
    forked(context);
    return failures;
}
