/* Memory, streams and events by the driver API alone. */
#define _GNU_SOURCE
#include "common.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t granularity;
static CUmemAllocationProp prop;
static CUmemAccessDesc access_all;

static CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t bytes) {
    CUdeviceptr address;
    CALL(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CALL(cuMemMap(address, bytes, 0, handle, 0));
    CALL(cuMemSetAccess(address, bytes, &access_all, 1));
    return address;
}

static void unmap(CUdeviceptr address, size_t bytes) {
    CALL(cuMemUnmap(address, bytes));
    CALL(cuMemAddressFree(address, bytes));
}

/* Virtual memory: two mappings of one allocation, an export that is imported again, and a dma-buf from the middle. */
static void virtual_memory(void) {
    size_t bytes = 2 * granularity;
    CUmemGenericAllocationHandle handle, imported;
    CALL(cuMemCreate(&handle, bytes, &prop, 0));
    CUdeviceptr one = map(handle, bytes), other = map(handle, bytes);
    CALL(cuMemsetD8(one, 0x5a, bytes));
    char byte = 0;
    CALL(cuMemcpyDtoH(&byte, other + bytes - 1, 1));
    CHECK(byte == 0x5a);

    int fd = -1;
    CALL(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CALL(cuMemImportFromShareableHandle(&imported, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    CUdeviceptr third = map(imported, bytes);
    CALL(cuMemsetD32(third + granularity, 0x01020304, 2));
    int words[2] = {0, 0};
    CALL(cuMemcpyDtoH(words, one + granularity, 8));
    CHECK(words[0] == 0x01020304 && words[1] == 0x01020304);

    long page = sysconf(_SC_PAGESIZE);
    CALL(cuMemGetHandleForAddressRange(&fd, one + granularity, (size_t)page, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    CHECK(fd >= 0);
    close(fd);

    /* The memory lives as long as a mapping has it. */
    CALL(cuMemRelease(handle));
    CALL(cuMemRelease(imported));
    unmap(one, bytes);
    unmap(third, bytes);
    CALL(cuMemcpyDtoH(words, other + granularity, 8));
    CHECK(words[1] == 0x01020304);
    CUdeviceptr base = 0;
    size_t size = 0;
    CALL(cuMemGetAddressRange(&base, &size, other + 5));
    CHECK(base == other && size == bytes);
    unmap(other, bytes);
    CHECK(cuMemcpyDtoH(words, other, 8) == CUDA_ERROR_INVALID_VALUE);
}

static void plain_memory(void) {
    size_t before, after, total;
    CALL(cuMemGetInfo(&before, &total));
    CHECK(before <= total && total > 0);
    CUdeviceptr a, b;
    CALL(cuMemAlloc(&a, 1 << 20));
    CALL(cuMemAlloc(&b, 1 << 20));
    CHECK(a % 256 == 0 && b % 256 == 0 && a != b);
    CALL(cuMemGetInfo(&after, &total));
    CHECK(after < before);
    unsigned char *host = malloc(1 << 20), *back = malloc(1 << 20);
    for (int i = 0; i < 1 << 20; i++)
        host[i] = (unsigned char)(i * 7 + (i >> 8));
    CALL(cuMemcpyHtoD(a, host, 1 << 20));
    CALL(cuMemcpyDtoD(b, a, 1 << 20));
    CALL(cuMemcpy((CUdeviceptr)(uintptr_t)back, b, 1 << 20));
    CHECK(memcmp(host, back, 1 << 20) == 0);
    int type = 0, ordinal = -1;
    CALL(cuPointerGetAttribute(&type, 2, a + 3));
    CALL(cuPointerGetAttribute(&ordinal, 9, a + 3));
    CHECK(type == 2 && ordinal == 0);
    CHECK(cuPointerGetAttribute(&type, 2, (CUdeviceptr)(uintptr_t)host) == CUDA_ERROR_INVALID_VALUE);
    CALL(cuMemFree(a));
    CALL(cuMemFree(b));
    size_t end;
    CALL(cuMemGetInfo(&end, &total));
    CHECK(end == before);
    free(host);
    free(back);
}

static void host_memory(void) {
    void *pinned;
    CALL(cuMemHostAlloc(&pinned, 10000, 3));
    CUdeviceptr device;
    CALL(cuMemHostGetDevicePointer(&device, (char *)pinned + 8, 0));
    int type = 0;
    CALL(cuPointerGetAttribute(&type, 2, device));
    CHECK(type == 1);
    CALL(cuMemFreeHost(pinned));
    size_t bytes = 1 << 16;
    char *own = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CALL(cuMemHostRegister(own, bytes, CU_MEMHOSTREGISTER_IOMEMORY));
    CALL(cuMemHostGetDevicePointer(&device, own, 0));
    CALL(cuMemsetD8(device, 3, bytes));
    CALL(cuCtxSynchronize());
    CHECK(own[0] == 3 && own[bytes - 1] == 3);
    CALL(cuMemHostUnregister(own));
    CHECK(cuMemHostGetDevicePointer(&device, own, 0) == CUDA_ERROR_INVALID_VALUE);
    munmap(own, bytes);
}

static volatile int gate;

static void wait_for_gate(void *data) {
    while (!gate)
        usleep(100);
    *(int *)data += 1;
}

static void add_one(void *data) {
    *(int *)data += 1;
}

static void streams(void) {
    CUstream one, other, blocking;
    CUevent event, from, to;
    CALL(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    CALL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    CALL(cuStreamCreate(&blocking, 0));
    CALL(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CALL(cuEventCreate(&from, 0));
    CALL(cuEventCreate(&to, 0));
    static int count;
    CUdeviceptr memory;
    CALL(cuMemAlloc(&memory, 4096));
    CALL(cuMemsetD8(memory, 0, 4096));

    CALL(cuEventRecord(from, one));
    CALL(cuLaunchHostFunc(one, wait_for_gate, &count));
    CALL(cuEventRecord(event, one));
    CALL(cuEventRecord(to, one));
    CHECK(cuStreamQuery(one) == CUDA_ERROR_NOT_READY && cuEventQuery(event) == CUDA_ERROR_NOT_READY);
    float time = -1;
    CHECK(cuEventElapsedTime(&time, from, to) == CUDA_ERROR_NOT_READY);
    /* The other stream waits for the event; the memory of this call may change as soon as it returns. */
    CALL(cuStreamWaitEvent(other, event, 0));
    char value = 7;
    CALL(cuMemcpyHtoDAsync(memory, &value, 1, other));
    value = 9;
    CHECK(cuStreamQuery(other) == CUDA_ERROR_NOT_READY);
    /* The default stream does not wait for streams of this kind, and an idle one is not held up. */
    CALL(cuMemcpyHtoD(memory + 1, &value, 1));
    char bytes[2] = {1, 1};
    CALL(cuMemcpyDtoH(bytes, memory, 2));
    CHECK(bytes[0] == 0 && bytes[1] == 9);
    gate = 1;
    CALL(cuStreamSynchronize(other));
    CALL(cuMemcpyDtoH(bytes, memory, 2));
    CHECK(bytes[0] == 7 && count == 1);
    CALL(cuEventSynchronize(to));
    CALL(cuEventElapsedTime(&time, from, to));
    CHECK(time > 0);

    /* The default stream waits for a stream of the usual kind. */
    gate = 0;
    CALL(cuLaunchHostFunc(blocking, wait_for_gate, &count));
    CALL(cuLaunchHostFunc(NULL, add_one, &count));
    CHECK(cuStreamQuery(NULL) == CUDA_ERROR_NOT_READY);
    gate = 1;
    CALL(cuCtxSynchronize());
    CHECK(count == 3);
    CALL(cuEventDestroy(event));
    CALL(cuEventDestroy(from));
    CALL(cuEventDestroy(to));
    CALL(cuStreamDestroy(one));
    CALL(cuStreamDestroy(other));
    CALL(cuStreamDestroy(blocking));
    CALL(cuMemFree(memory));
}

static void lookup(void) {
    CUresult (*version)(int *) = NULL;
    void *function = NULL, *same = NULL;
    int status = -1, found = 0;
    CALL(cuGetProcAddress("cuDriverGetVersion", &function, 12080, 0, &status));
    memcpy(&version, &function, sizeof version);
    CHECK(status == 0 && version != NULL && version(&found) == CUDA_SUCCESS && found >= 12000);
    CALL(cuGetProcAddress("cuMemAlloc", &function, 12080, 0, NULL));
    CUresult (*own)(CUdeviceptr *, size_t) = cuMemAlloc;
    memcpy(&same, &own, sizeof same);
    CHECK(function == same);
    CALL(cuGetProcAddress("cuNoSuchFunction", &function, 12080, 0, &status));
    CHECK(function == NULL && status == 1);
}

int main(void) {
    CALL(cuInit(0));
    CUcontext context;
    char name[64];
    CALL(cuDeviceGetName(name, sizeof name, 0));
    printf("device %s\n", name);
    CALL(cuCtxCreate(&context, 0, 0));
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.allocFlags.gpuDirectRDMACapable = 1;
    access_all.location = prop.location;
    access_all.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CALL(cuMemGetAllocationGranularity(&granularity, &prop, 0));
    plain_memory();
    virtual_memory();
    host_memory();
    streams();
    lookup();
    CALL(cuCtxDestroy(context));
    return failures;
}
