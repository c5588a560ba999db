/* Wrong calls, with the codes that the reference specifies. Usage: misuse FILE.ptx; needs two devices. */
#define _GNU_SOURCE
#include "common.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char broken[] = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry f()\n{\n    no.such.form;\n}\n";
static const char newer[] = ".version 99.0\n.target sm_70\n.address_size 64\n";
/* The driver is of CUDA 12.8, which knows PTX up to 8.7, and the devices have compute capability 9.0. */
#define FOR(version, target) ".version " version "\n.target " target "\n.address_size 64\n"
static const char undefined[] = ".version 7.0\n.target sm_70\n.address_size 64\n.extern .func g();\n"
                                ".visible .entry f()\n{\n    call g, ();\n    ret;\n}\n";
static const char machine_code[] = "\x7f"
                                   "ELF\x02\x01\x01";

static void before_init(void) {
    int value;
    CUcontext context;
    CUdeviceptr memory;
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&value));
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDevicePrimaryCtxRetain(&context, 0));
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc(&memory, 4));
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuCtxGetCurrent(&context));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuInit(1));
    EXPECT(CUDA_SUCCESS, cuInit(0));
    EXPECT(CUDA_SUCCESS, cuInit(0));
}

static void devices(void) {
    int value;
    char text[32];
    CUcontext context;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuDeviceGetCount(NULL));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&value, 99));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&value, -1));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetName(text, 32, 99));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuDeviceGetName(NULL, 32, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuDeviceGetAttribute(&value, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuDeviceGetAttribute(&value, 100000, 0));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetAttribute(&value, 1, 99));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetByPCIBusId(&value, "ffff:ff:1f.7"));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDevicePrimaryCtxRetain(&context, 99));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(0));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuCtxCreate(&context, 0, 99));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCtxCreate(NULL, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCtxCreate(&context, 0x10000, 0));
}

static void without_context(void) {
    CUdeviceptr memory;
    CUstream stream;
    CUcontext context;
    CUdevice device;
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&memory, 4));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuStreamCreate(&stream, 0));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxGetDevice(&device));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxPopCurrent(&context));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxPushCurrent((CUcontext)&memory));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy((CUcontext)&memory));
    CHECK(cuCtxGetCurrent(&context) == CUDA_SUCCESS && context == NULL);
}

static void memory(void) {
    CUdeviceptr memory, other;
    size_t bytes, all, total;
    int type;
    char byte = 0;
    void *host;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(NULL, 4));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&memory, 0));
    CALL(cuMemGetInfo(&all, &total));
    EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&memory, total + 1));
    CALL(cuMemAlloc(&memory, 4096));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(memory + 8));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(12345));
    EXPECT(CUDA_SUCCESS, cuMemFree(0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD(memory + 4090, &all, 8));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD(memory, NULL, 8));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD((CUdeviceptr)(uintptr_t)&all, &byte, 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(&byte, 0, 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoD(memory, (CUdeviceptr)(uintptr_t)&byte, 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(memory, 0, 4097));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD32(memory + 2, 0, 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, 2, (CUdeviceptr)(uintptr_t)&byte));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, 9999, memory));
    EXPECT(CUDA_ERROR_NOT_FOUND, cuMemGetAddressRange(&other, &bytes, (CUdeviceptr)(uintptr_t)&byte));
    CALL(cuMemFree(memory));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(memory));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostAlloc(&host, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostAlloc(&host, 16, 0x100));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(&byte));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostGetDevicePointer(&other, &byte, 0));
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuMemAllocManaged(&other, 16, 1));
}

/* Expects the code of a call with one field of `copy` changed. */
#define EXPECT_WITH(code, field, value, call) \
    do {                                      \
        __typeof__(copy) good = copy;         \
        copy.field = (value);                 \
        EXPECT(code, call);                   \
        copy = good;                          \
    } while (0)

static void cuboids(void) {
    CUdeviceptr memory;
    char bytes[64];
    CALL(cuMemAlloc(&memory, 4096));
    CUDA_MEMCPY3D copy = {
        .srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = bytes, .srcPitch = 8, .srcHeight = 2,
        .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = memory, .dstPitch = 512, .dstHeight = 2,
        .WidthInBytes = 8, .Height = 2, .Depth = 4,
    };
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpy3D(NULL));
    EXPECT(CUDA_SUCCESS, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_SUCCESS, Depth, 0, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, Depth, 5, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, Depth, (size_t)1 << 60, cuMemcpy3DAsync(&copy, NULL));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, dstZ, 1, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, dstZ, (size_t)1 << 60, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, dstHeight, 1, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, srcY, 1, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, srcPitch, 7, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, srcLOD, 1, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, reserved1, bytes, cuMemcpy3D(&copy));
    EXPECT_WITH(CUDA_ERROR_NOT_SUPPORTED, srcMemoryType, CU_MEMORYTYPE_ARRAY, cuMemcpy3D(&copy));
    CALL(cuMemFree(memory));
}

static void rectangles(void) {
    CUdeviceptr memory;
    char bytes[64];
    CALL(cuMemAlloc(&memory, 4096));
    CUDA_MEMCPY2D copy = {
        .srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = bytes, .srcPitch = 16,
        .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = memory, .dstPitch = 1024,
        .WidthInBytes = 16, .Height = 4,
    };
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpy2D(NULL));
    EXPECT(CUDA_SUCCESS, cuMemcpy2D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, dstY, 1, cuMemcpy2D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, dstXInBytes, 1009, cuMemcpy2D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, srcPitch, 15, cuMemcpy2D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, srcPitch, (size_t)1 << 32, cuMemcpy2D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, Height, (size_t)1 << 62, cuMemcpy2D(&copy));
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = bytes;
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = memory;
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, Height, (size_t)1 << 50, cuMemcpy2D(&copy));
    EXPECT_WITH(CUDA_ERROR_INVALID_VALUE, srcMemoryType, 0, cuMemcpy2D(&copy));
    EXPECT_WITH(CUDA_ERROR_NOT_SUPPORTED, srcMemoryType, CU_MEMORYTYPE_ARRAY, cuMemcpy2D(&copy));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD2D8(memory, 1024, 0, 16, 5));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD2D16(memory + 1, 1024, 0, 16, 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD2D16(memory, 1023, 0, 16, 2));
    CALL(cuMemFree(memory));
}

static void pools(void) {
    CUdeviceptr memory;
    CUmemoryPool pool, usual;
    CUmemPoolProps props;
    CUmemAccessDesc access;
    uint64_t value = 1;
    char byte;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAllocAsync(NULL, 16, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAllocAsync(&memory, 0, NULL));
    EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAllocAsync(&memory, (size_t)1 << 60, NULL));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuMemAllocAsync(&memory, 16, (CUstream)&byte));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAllocFromPoolAsync(&memory, 16, (CUmemoryPool)&byte, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync((CUdeviceptr)(uintptr_t)&byte, NULL));
    CALL(cuMemAllocAsync(&memory, 16, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(memory + 8, NULL));
    CALL(cuMemFreeAsync(memory, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(memory, NULL));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetDefaultMemPool(&usual, 99));
    CALL(cuDeviceGetDefaultMemPool(&usual, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuDeviceSetMemPool(1, usual));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolDestroy(usual));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolGetAttribute(usual, 99, &value));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolSetAttribute(usual, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &value));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolSetAttribute(usual, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &value));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolTrimTo((CUmemoryPool)&byte, 0));
    memset(&props, 0, sizeof props);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolCreate(&pool, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolCreate(&pool, &props));
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    props.location.id = 99;
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuMemPoolCreate(&pool, &props));
    props.location.id = 1;
    props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuMemPoolCreate(&pool, &props));
    props.handleTypes = 0;
    CALL(cuMemPoolCreate(&pool, &props));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuDeviceSetMemPool(0, pool));
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = 0;
    access.flags = 2;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolSetAccess(pool, &access, 1));
    CALL(cuMemPoolDestroy(pool));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolDestroy(pool));
}

static void words(void) {
    CUdeviceptr memory;
    CUstreamBatchMemOpParams step;
    CALL(cuMemAlloc(&memory, 16));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue32(NULL, memory + 2, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue32(NULL, memory + 16, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue32(NULL, memory, 0, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue32(NULL, memory, 0, 4));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue32(NULL, 0, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(NULL, 256, &step, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(NULL, 1, NULL, 0));
    memset(&step, 0, sizeof step);
    step.operation = 99;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(NULL, 1, &step, 0));
    /* A reduction with a bad type, operation, flags, alignment or address. */
    const struct { int type, operation; unsigned flags; CUdeviceptr address; } bad[] = {
        {15, 0, 0, memory}, {CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64, 1, 0, memory},
        {CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64, 0, 1, memory}, {CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64, 0, 0, memory + 4},
        {CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64, 0, 0, memory + 16}, {CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_32, 0, 0, 0},
    };
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        step = (CUstreamBatchMemOpParams){.atomicReduction = {
            .operation = CU_STREAM_MEM_OP_ATOMIC_REDUCTION, .flags = bad[i].flags, .reductionOp = bad[i].operation,
            .dataType = bad[i].type, .address = bad[i].address,
        }};
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamBatchMemOp(NULL, 1, &step, 0));
    }
    CALL(cuMemFree(memory));
}

static void libraries(const char *path) {
    CUlibrary library;
    CUkernel kernel;
    CUfunction function;
    CUdeviceptr address;
    size_t bytes;
    const char *name;
    int value, option = CU_LIBRARY_BINARY_IS_PRESERVED;
    void *values[] = {NULL};
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLibraryLoadData(&library, NULL, NULL, NULL, 0, NULL, NULL, 0));
    EXPECT(CUDA_ERROR_INVALID_PTX, cuLibraryLoadData(&library, broken, NULL, NULL, 0, NULL, NULL, 0));
    EXPECT(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, cuLibraryLoadData(&library, newer, NULL, NULL, 0, NULL, NULL, 0));
    EXPECT(CUDA_ERROR_NO_BINARY_FOR_GPU, cuLibraryLoadData(&library, machine_code, NULL, NULL, 0, NULL, NULL, 0));
    EXPECT(CUDA_ERROR_FILE_NOT_FOUND, cuLibraryLoadFromFile(&library, "/nonexistent.ptx", NULL, NULL, 0, NULL, NULL, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLibraryLoadFromFile(&library, path, NULL, NULL, 0, &option, values, 1));
    CALL(cuLibraryLoadFromFile(&library, path, NULL, NULL, 0, NULL, NULL, 0));
    EXPECT(CUDA_ERROR_NOT_FOUND, cuLibraryGetKernel(&kernel, library, "absent"));
    EXPECT(CUDA_ERROR_NOT_FOUND, cuLibraryGetGlobal(&address, &bytes, library, "absent"));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuLibraryGetKernel(&kernel, (CUlibrary)&value, "store"));
    CALL(cuLibraryGetKernel(&kernel, library, "store"));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuKernelGetAttribute(&value, 9999, kernel, 0));
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuKernelGetAttribute(&value, 0, kernel, 99));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 30, kernel, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuKernelGetName(NULL, kernel));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuKernelGetName(&name, NULL));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuKernelGetFunction(&function, (CUkernel)&value));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuKernelGetParamInfo(kernel, 2, &bytes, NULL));
    CALL(cuLibraryUnload(library));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLibraryUnload(library));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuKernelGetFunction(&function, kernel));
}

static void registration(void) {
    long page = sysconf(_SC_PAGESIZE);
    char *own = mmap(NULL, 2 * (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(own + page, (size_t)page);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister(NULL, 16, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister(own, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister(own, 16, 0x100));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister(own, 2 * (size_t)page, 0));
    EXPECT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(own));
    CALL(cuMemHostRegister(own, (size_t)page, 0));
    EXPECT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(own, (size_t)page, 0));
    EXPECT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(own + 64, 64, 0));
    EXPECT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(own + 64));
    CALL(cuMemHostUnregister(own));
    munmap(own, (size_t)page);
}

static void virtual_memory(void) {
    CUmemAllocationProp prop;
    CUmemAccessDesc access;
    CUmemGenericAllocationHandle handle, private_handle;
    CUdeviceptr address;
    size_t unit;
    int fd, pipes[2];
    memset(&prop, 0, sizeof prop);
    memset(&access, 0, sizeof access);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemGetAllocationGranularity(&unit, &prop, 0));
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CALL(cuMemGetAllocationGranularity(&unit, &prop, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&handle, unit / 2, &prop, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&handle, 0, &prop, 0));
    prop.location.id = 99;
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuMemCreate(&handle, unit, &prop, 0));
    prop.location.id = 0;
    CALL(cuMemCreate(&private_handle, unit, &prop, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemExportToShareableHandle(&fd, private_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CALL(cuMemRelease(private_handle));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemRelease(private_handle));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemRelease(1234));
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CALL(cuMemCreate(&handle, unit, &prop, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&address, unit + 100, 0, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&address, unit, 3, 0, 0));
    CALL(cuMemAddressReserve(&address, 2 * unit, 0, 0, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemMap(address + 4096, unit, 0, handle, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, 2 * unit, 0, handle, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemMap(address + 2 * unit, unit, 0, handle, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, unit, unit, handle, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, unit, 0, 1234, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(address, unit, &access, 1));
    CALL(cuMemMap(address, unit, 0, handle, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, unit, 0, handle, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(address, 0, 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(address, 2 * unit, &access, 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(address, unit, &access, 0));
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuMemGetHandleForAddressRange(&fd, address, unit, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemGetHandleForAddressRange(&fd, address, unit + 1, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address, unit / 2));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(address));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address, 2 * unit));
    CALL(cuMemUnmap(address, unit));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address, unit));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address, unit));
    CALL(cuMemAddressFree(address, 2 * unit));
    CALL(cuMemRelease(handle));
    CHECK(pipe(pipes) == 0);
    EXPECT(CUDA_ERROR_INVALID_VALUE,
           cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)pipes[0], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemImportFromShareableHandle(&handle, (void *)987654, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
}

static void nothing(void *data) {
    (void)data;
}

static void streams_and_events(CUcontext other) {
    CUstream stream;
    CUevent event, timeless;
    float time;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamCreate(&stream, 0x100));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize((CUstream)&time));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuEventCreate(&event, 0x100));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuEventCreate(&event, CU_EVENT_INTERPROCESS));
    CALL(cuEventCreate(&event, 0));
    CALL(cuEventCreate(&timeless, CU_EVENT_DISABLE_TIMING));
    EXPECT(CUDA_SUCCESS, cuEventQuery(event));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&time, event, event));
    CALL(cuEventRecord(event, NULL));
    CALL(cuEventRecord(timeless, NULL));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&time, event, timeless));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventRecord((CUevent)&time, NULL));
    CALL(cuStreamCreate(&stream, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuStreamWaitEvent(stream, event, 0x100));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLaunchHostFunc(stream, NULL, NULL));
    CALL(cuCtxPushCurrent(other));
    CUdeviceptr memory;
    CALL(cuMemAlloc(&memory, 4));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuMemsetD8Async(memory, 0, 4, stream));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(event, NULL));
    CALL(cuMemFree(memory));
    CALL(cuCtxPopCurrent(NULL));
    CALL(cuStreamDestroy(stream));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamDestroy(stream));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuLaunchHostFunc(stream, nothing, NULL));
    CALL(cuEventDestroy(event));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(event));
    CALL(cuEventDestroy(timeless));
}

static void modules(const char *path, CUcontext other) {
    CUmodule module;
    CUfunction function;
    CUlinkState link;
    CUdeviceptr address;
    void *image;
    size_t bytes;
    int value;
    char log[400];
    int options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, (void *)sizeof log};
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuModuleLoadData(&module, NULL));
    EXPECT(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&module, ""));
    EXPECT(CUDA_ERROR_NO_BINARY_FOR_GPU, cuModuleLoadData(&module, machine_code));
    EXPECT(CUDA_ERROR_INVALID_PTX, cuModuleLoadData(&module, "this is no PTX"));
    EXPECT(CUDA_ERROR_INVALID_PTX, cuModuleLoadDataEx(&module, broken, 2, options, values));
    CHECK(strstr(log, ":6:") && strstr(log, "no.such.form") && (size_t)values[1] == strlen(log));
    EXPECT(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, cuModuleLoadData(&module, newer));
    EXPECT(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, cuModuleLoadData(&module, FOR("8.8", "sm_90")));
    EXPECT(CUDA_ERROR_INVALID_PTX, cuModuleLoadData(&module, FOR("8.7", "sm_100")));
    EXPECT(CUDA_ERROR_INVALID_PTX, cuModuleLoadData(&module, FOR("8.7", "sm_80a")));
    EXPECT(CUDA_ERROR_INVALID_PTX, cuModuleLoadData(&module, FOR("8.7", "sm_80f")));
    CALL(cuLinkCreate(0, NULL, NULL, &link));
    EXPECT(CUDA_ERROR_INVALID_PTX,
           cuLinkAddData(link, CU_JIT_INPUT_PTX, (void *)FOR("8.7", "sm_120"), sizeof FOR("8.7", "sm_120"), "x", 0, NULL, NULL));
    CALL(cuLinkDestroy(link));
    CALL(cuModuleLoadData(&module, FOR("8.7", "sm_90a")));
    CALL(cuModuleUnload(module));
    CALL(cuModuleLoadData(&module, FOR("8.7", "sm_90")));
    CALL(cuModuleUnload(module));
    EXPECT(CUDA_ERROR_FILE_NOT_FOUND, cuModuleLoad(&module, "/nonexistent.ptx"));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuModuleUnload((CUmodule)&value));
    CALL(cuModuleLoad(&module, path));
    EXPECT(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&function, module, "absent"));
    EXPECT(CUDA_ERROR_NOT_FOUND, cuModuleGetGlobal(&address, &bytes, module, "absent"));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuModuleGetFunction(&function, (CUmodule)&value, "store"));
    CALL(cuModuleGetFunction(&function, module, "store"));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuFuncGetAttribute(&value, 9999, function));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuFuncSetAttribute(function, 8, 1 << 30));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuOccupancyMaxActiveBlocksPerMultiprocessor(&value, function, 0, 0));
    unsigned word = 0;
    CALL(cuMemAlloc(&address, 4));
    void *parameters[] = {&address, &word};
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(function, 0, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(function, 1, 1, 1, 1025, 1, 1, 0, NULL, parameters, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(function, 1, 1, 1, 64, 64, 1, 0, NULL, parameters, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(function, 1, 65536, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 100000, NULL, parameters, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuLaunchKernel((CUfunction)&value, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, (CUstream)&value, parameters, NULL));
    EXPECT(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, cuLaunchCooperativeKernel(function, 1 << 20, 1, 1, 1, 1, 1, 0, NULL, parameters));
    CALL(cuCtxPushCurrent(other));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    CALL(cuCtxPopCurrent(NULL));
    CALL(cuModuleUnload(module));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuModuleUnload(module));

    options[0] = 9999;
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLinkCreate(2, options, values, &link));
    CALL(cuLinkCreate(0, NULL, NULL, &link));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLinkComplete(link, &image, &bytes));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLinkAddData(link, CU_JIT_INPUT_PTX, NULL, 4, "x", 0, NULL, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuLinkAddData(link, 77, (void *)broken, sizeof broken, "x", 0, NULL, NULL));
    EXPECT(CUDA_ERROR_NO_BINARY_FOR_GPU, cuLinkAddData(link, CU_JIT_INPUT_CUBIN, (void *)machine_code, 8, "x", 0, NULL, NULL));
    EXPECT(CUDA_ERROR_INVALID_PTX, cuLinkAddData(link, CU_JIT_INPUT_PTX, (void *)broken, sizeof broken, "x", 0, NULL, NULL));
    EXPECT(CUDA_ERROR_FILE_NOT_FOUND, cuLinkAddFile(link, CU_JIT_INPUT_PTX, "/nonexistent.ptx", 0, NULL, NULL));
    CALL(cuLinkAddData(link, CU_JIT_INPUT_PTX, (void *)undefined, sizeof undefined, "undefined.ptx", 0, NULL, NULL));
    CHECK(cuLinkComplete(link, &image, &bytes) != CUDA_SUCCESS);
    CALL(cuLinkDestroy(link));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuLinkDestroy(link));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuLinkComplete(link, &image, &bytes));
}

static void contexts(CUcontext context, CUcontext peer) {
    size_t value;
    const void *table;
    EXPECT(CUDA_ERROR_UNSUPPORTED_LIMIT, cuCtxGetLimit(&value, 9999));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxEnablePeerAccess(context, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuCtxEnablePeerAccess(peer, 1));
    EXPECT(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, cuCtxDisablePeerAccess(peer));
    CALL(cuCtxEnablePeerAccess(peer, 0));
    EXPECT(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cuCtxEnablePeerAccess(peer, 0));
    CALL(cuCtxDisablePeerAccess(peer));
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuGetExportTable(&table, "0123456789abcdef"));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuGetErrorName(123456, (const char **)&table));
    CALL(cuCtxPushCurrent(peer));
    CALL(cuCtxPushCurrent(context));
    CALL(cuCtxDestroy(peer));
    CALL(cuCtxPopCurrent(NULL));
    EXPECT(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxSynchronize());
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy(peer));
    CALL(cuCtxPopCurrent(NULL));
}

int main(int argc, char **argv) {
    CUcontext context, peer;
    if (argc != 2)
        return 2;
    before_init();
    devices();
    without_context();
    CALL(cuCtxCreate(&peer, 0, 1));
    CALL(cuCtxCreate(&context, 0, 0));
    memory();
    rectangles();
    cuboids();
    pools();
    words();
    libraries(argv[1]);
    registration();
    virtual_memory();
    streams_and_events(peer);
    modules(argv[1], peer);
    contexts(context, peer);
    CALL(cuCtxDestroy(context));
    return failures;
}
