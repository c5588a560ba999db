/* Memory, streams and events through the driver API alone. */
#define _GNU_SOURCE
#include "common.h"

#include <dlfcn.h>
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

/* Virtual memory: two mappings of one allocation, an export that is imported again, and a dma-buf of the middle. */
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
    int words[3] = {0, 0, 0};
    CALL(cuMemcpyDtoH(words, one + granularity, 8));
    CHECK(words[0] == 0x01020304 && words[1] == 0x01020304);

    long page = sysconf(_SC_PAGESIZE);
    CALL(cuMemGetHandleForAddressRange(&fd, one + granularity, (size_t)page, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    CHECK(fd >= 0);
    /* A software card gets an address for the dma-buf's bytes, up to the end of the mapping. */
    CUresult (*attach)(CUdeviceptr *, int, uint64_t, size_t) = dlsym(RTLD_DEFAULT, "cuSoftGpuAttachDmaBuf");
    CUdeviceptr attached = 0;
    CHECK(attach && attach(&attached, fd, 8, granularity - 8) == CUDA_SUCCESS);
    CALL(cuMemsetD32(attached, 7, 1));
    CALL(cuMemcpyDtoH(words, one + granularity, 12));
    CHECK(words[0] == 0x01020304 && words[2] == 7);
    CHECK(attach(&attached, fd, 8, granularity - 7) == CUDA_ERROR_INVALID_VALUE);
    CHECK(attach(&attached, 0, 0, 8) == CUDA_ERROR_INVALID_VALUE && attach(&attached, -1, 0, 8) == CUDA_ERROR_INVALID_VALUE);
    close(fd);

    /* The memory lives as long as it is mapped anywhere. */
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

/* Zeros over many pages: the bytes around them keep their values, and the memory takes new ones. */
static void zeros(void) {
    enum { LEN = 1 << 20, FROM = 100, COUNT = (1 << 20) - 5000 };
    CUdeviceptr memory;
    unsigned char *host = malloc(LEN);
    CALL(cuMemAlloc(&memory, LEN));
    CALL(cuMemsetD8(memory, 0x77, LEN));
    CALL(cuMemsetD32(memory + FROM, 0, COUNT / 4));
    CALL(cuMemcpyDtoH(host, memory, LEN));
    int right = 0;
    for (int i = 0; i < LEN; i++)
        right += host[i] == (i >= FROM && i < FROM + COUNT ? 0 : 0x77);
    CHECK(right == LEN);
    CALL(cuMemsetD8(memory + 8192, 5, 4096));
    CALL(cuMemcpyDtoH(host, memory + 8191, 4098));
    CHECK(host[0] == 0 && host[1] == 5 && host[4096] == 5 && host[4097] == 0);
    CALL(cuMemFree(memory));
    free(host);
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
    /* The other stream waits for the event; the source may change as soon as the copy call returns. */
    CALL(cuStreamWaitEvent(other, event, 0));
    char value = 7;
    CALL(cuMemcpyHtoDAsync(memory, &value, 1, other));
    value = 9;
    CHECK(cuStreamQuery(other) == CUDA_ERROR_NOT_READY);
    /* The default stream doesn't wait for non-blocking streams, and isn't held up while idle. */
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

    /* The default stream waits for a blocking stream. */
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

/* A cuboid from the middle of the slices goes to the device and back; the rest doesn't change. */
static void cuboids(void) {
    enum { PITCH = 40, ROWS = 12, SLICES = 6, WIDTH = 21, HEIGHT = 7, DEPTH = 3, X = 5, Y = 2, Z = 1 };
    static unsigned char host[SLICES][ROWS][PITCH], back[SLICES][ROWS][PITCH];
    for (int z = 0; z < SLICES; z++)
        for (int y = 0; y < ROWS; y++)
            for (int x = 0; x < PITCH; x++)
                host[z][y][x] = (unsigned char)(z * 77 + y * 31 + x);
    memset(back, 0xee, sizeof back);
    CUdeviceptr memory;
    CALL(cuMemAlloc(&memory, 512 * 9 * 4));
    CUDA_MEMCPY3D copy = {
        .srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = host, .srcPitch = PITCH, .srcHeight = ROWS, .srcXInBytes = X, .srcY = Y, .srcZ = Z,
        .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = memory, .dstPitch = 512, .dstHeight = 9, .dstXInBytes = 3, .dstY = 2, .dstZ = 1,
        .WidthInBytes = WIDTH, .Height = HEIGHT, .Depth = DEPTH,
    };
    CALL(cuMemcpy3D(&copy));
    copy = (CUDA_MEMCPY3D){
        .srcMemoryType = CU_MEMORYTYPE_UNIFIED, .srcDevice = memory, .srcPitch = 512, .srcHeight = 9, .srcXInBytes = 3, .srcY = 2, .srcZ = 1,
        .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = back, .dstPitch = PITCH, .dstHeight = ROWS, .dstXInBytes = X, .dstY = Y, .dstZ = Z,
        .WidthInBytes = WIDTH, .Height = HEIGHT, .Depth = DEPTH,
    };
    CALL(cuMemcpy3DAsync(&copy, NULL));
    CALL(cuStreamSynchronize(NULL));
    int right = 0;
    for (int z = 0; z < SLICES; z++)
        for (int y = 0; y < ROWS; y++)
            for (int x = 0; x < PITCH; x++) {
                int inside = z >= Z && z < Z + DEPTH && y >= Y && y < Y + HEIGHT && x >= X && x < X + WIDTH;
                right += back[z][y][x] == (inside ? host[z][y][x] : 0xee);
            }
    CHECK(right == SLICES * ROWS * PITCH);
    CALL(cuMemFree(memory));
}

/* A rectangle from the middle of the rows goes to the device, within it and back; the rest doesn't change. */
static void rectangles(void) {
    enum { PITCH = 96, ROWS = 40, WIDTH = 50, HEIGHT = 30, X = 7, Y = 5 };
    unsigned char host[ROWS][PITCH], back[ROWS][PITCH];
    for (int y = 0; y < ROWS; y++)
        for (int x = 0; x < PITCH; x++)
            host[y][x] = (unsigned char)(y * 31 + x);
    memset(back, 0xee, sizeof back);
    CUdeviceptr memory, other;
    size_t pitch = 512;
    CALL(cuMemAlloc(&memory, pitch * ROWS));
    CALL(cuMemAlloc(&other, pitch * ROWS));
    CALL(cuMemsetD8(memory, 0x11, pitch * ROWS));
    CUDA_MEMCPY2D copy = {
        .srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = host, .srcPitch = PITCH, .srcXInBytes = X, .srcY = Y,
        .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = memory, .dstPitch = pitch, .dstXInBytes = 3, .dstY = 2,
        .WidthInBytes = WIDTH, .Height = HEIGHT,
    };
    CALL(cuMemcpy2D(&copy));
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = memory;
    copy.srcPitch = pitch;
    copy.srcXInBytes = 3;
    copy.srcY = 2;
    copy.dstDevice = other;
    copy.dstXInBytes = copy.dstY = 0;
    CALL(cuMemcpy2D(&copy));
    copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
    copy.srcDevice = other;
    copy.srcXInBytes = copy.srcY = 0;
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = back;
    copy.dstPitch = PITCH;
    copy.dstXInBytes = X;
    copy.dstY = Y;
    CALL(cuMemcpy2DAsync(&copy, NULL));
    CALL(cuStreamSynchronize(NULL));
    int right = 0;
    for (int y = 0; y < ROWS; y++)
        for (int x = 0; x < PITCH; x++) {
            int inside = y >= Y && y < Y + HEIGHT && x >= X && x < X + WIDTH;
            right += back[y][x] == (inside ? host[y][x] : 0xee);
        }
    CHECK(right == ROWS * PITCH);
    CALL(cuMemcpyDtoH(back, memory, sizeof back));
    CHECK(back[0][0] == 0x11);

    /* Set two elements of each row; the rest doesn't change. */
    unsigned short rows[ROWS][PITCH / 2];
    CALL(cuMemsetD8(memory, 0, sizeof rows));
    CALL(cuMemsetD2D16(memory + 4, PITCH, 0x0102, 2, ROWS));
    CALL(cuMemcpyDtoH(rows, memory, sizeof rows));
    right = 0;
    for (int y = 0; y < ROWS; y++)
        for (int x = 0; x < PITCH / 2; x++)
            right += rows[y][x] == (x == 2 || x == 3 ? 0x0102 : 0);
    CHECK(right == ROWS * PITCH / 2);
    CALL(cuMemFree(memory));
    CALL(cuMemFree(other));
}

/* Stream-ordered memory, which lives until the stream reaches the free. */
static void pools(void) {
    CUstream stream;
    CUmemoryPool usual, current, own, of_memory = NULL;
    CUdeviceptr memory, other;
    CUmemPoolProps props;
    uint64_t used = 1, high = 0, threshold = 1 << 20, value = 0;
    size_t before, after, total;
    static int count;
    char byte = 0;
    int flag = 0;
    CALL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CALL(cuDeviceGetDefaultMemPool(&usual, 0));
    CALL(cuDeviceGetMemPool(&current, 0));
    CHECK(usual == current);
    CALL(cuMemPoolSetAttribute(usual, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    CALL(cuMemPoolGetAttribute(usual, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
    CALL(cuMemPoolGetAttribute(usual, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, &flag));
    CHECK(value == threshold && flag == 1);
    CALL(cuMemGetInfo(&before, &total));
    gate = 0;
    CALL(cuMemAllocAsync(&memory, 1 << 20, stream));
    CALL(cuMemsetD8Async(memory, 0x42, 1 << 20, stream));
    CALL(cuStreamSynchronize(stream));
    CALL(cuLaunchHostFunc(stream, wait_for_gate, &count));
    CALL(cuMemFreeAsync(memory, stream));
    CHECK(cuMemFreeAsync(memory, stream) == CUDA_ERROR_INVALID_VALUE && cuMemFree(memory) == CUDA_ERROR_INVALID_VALUE);
    CALL(cuPointerGetAttribute(&of_memory, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, memory));
    CALL(cuMemPoolGetAttribute(usual, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
    CALL(cuMemcpyDtoH(&byte, memory + 5, 1));
    CHECK(of_memory == usual && used == 1 << 20 && byte == 0x42);
    gate = 1;
    CALL(cuStreamSynchronize(stream));
    CALL(cuMemPoolGetAttribute(usual, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
    CALL(cuMemPoolGetAttribute(usual, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &high));
    CALL(cuMemGetInfo(&after, &total));
    CHECK(used == 0 && high == 1 << 20 && before == after && cuMemsetD8(memory, 0, 1) == CUDA_ERROR_INVALID_VALUE);

    /* The program's own pool, which is the current one until it is destroyed. */
    memset(&props, 0, sizeof props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    props.maxSize = 1 << 20;
    CALL(cuMemPoolCreate(&own, &props));
    CALL(cuDeviceSetMemPool(0, own));
    CALL(cuMemAllocAsync(&memory, 1 << 19, stream));
    CHECK(cuMemAllocAsync(&other, (1 << 19) + 1, stream) == CUDA_ERROR_OUT_OF_MEMORY);
    CALL(cuMemAllocFromPoolAsync(&other, 1 << 20, usual, stream));
    CALL(cuMemPoolDestroy(own));
    CALL(cuDeviceGetMemPool(&current, 0));
    CHECK(current == usual);
    /* The memory outlives its pool, and both frees take both kinds of memory. */
    CALL(cuMemsetD8(memory, 1, 1 << 19));
    CALL(cuMemFree(memory));
    CALL(cuMemFreeAsync(other, NULL));
    CALL(cuMemAlloc(&memory, 100));
    CALL(cuMemFreeAsync(memory, stream));
    CALL(cuCtxSynchronize());
    CALL(cuMemGetInfo(&after, &total));
    CHECK(before == after);
    CALL(cuStreamDestroy(stream));
}

/* Stream waits and writes: one stream waits for the host, and another for that stream. */
static void words(void) {
    CUstream one, other;
    CUdeviceptr memory;
    volatile uint32_t *host;
    uint64_t values[2] = {0, 0};
    CALL(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    CALL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    CALL(cuMemHostAlloc((void **)&host, 8, 2));
    CALL(cuMemAlloc(&memory, 16));
    CALL(cuMemsetD8(memory, 0, 16));
    *host = 4;
    CALL(cuStreamWaitValue32(one, (CUdeviceptr)(uintptr_t)host, 5, CU_STREAM_WAIT_VALUE_GEQ));
    CALL(cuStreamWriteValue32(one, memory, 77, 0));
    CUstreamBatchMemOpParams steps[3];
    memset(steps, 0, sizeof steps);
    steps[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    steps[0].waitValue.address = memory;
    steps[0].waitValue.value64 = 77;
    steps[0].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    steps[1].flushRemoteWrites.operation = CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES;
    steps[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    steps[2].writeValue.address = memory + 8;
    steps[2].writeValue.value64 = 0x0102030405060708;
    CALL(cuStreamBatchMemOp(other, 3, steps, 0));
    usleep(2000);
    CHECK(cuStreamQuery(one) == CUDA_ERROR_NOT_READY && cuStreamQuery(other) == CUDA_ERROR_NOT_READY);
    *host = 6;
    CALL(cuStreamSynchronize(other));
    CALL(cuMemcpyDtoH(values, memory, 16));
    CHECK(values[0] == 77 && values[1] == 0x0102030405060708);
    CALL(cuMemFree(memory));
    CALL(cuMemFreeHost((void *)host));
    CALL(cuStreamDestroy(one));
    CALL(cuStreamDestroy(other));
}

static CUstreamBatchMemOpParams reduction(int operation, int type, CUdeviceptr address, uint64_t value) {
    CUstreamBatchMemOpParams step;
    memset(&step, 0, sizeof step);
    step.atomicReduction.operation = CU_STREAM_MEM_OP_ATOMIC_REDUCTION;
    step.atomicReduction.reductionOp = operation;
    step.atomicReduction.dataType = type;
    step.atomicReduction.address = address;
    step.atomicReduction.value = value;
    return step;
}

/* Two streams add to one word at the same time, and a 32-bit sum doesn't carry into the next word. */
static void reductions(void) {
    enum { ROUNDS = 50, STEPS = 100 };
    CUstream streams[2];
    CUdeviceptr memory;
    CUstreamBatchMemOpParams steps[STEPS];
    uint64_t values[3] = {1, 0xffffffff00000000, 0xf0f0};
    int supported = 0;
    CALL(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED, 0));
    CHECK(supported == 1);
    CALL(cuMemAlloc(&memory, 24));
    CALL(cuMemcpyHtoD(memory, values, 24));
    for (int i = 0; i < STEPS; i++)
        steps[i] = reduction(CU_STREAM_ATOMIC_REDUCTION_OP_ADD, CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64, memory, 1ull << 33);
    for (int i = 0; i < 2; i++) CALL(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < 2; i++) CALL(cuStreamBatchMemOp(streams[i], STEPS, steps, 0));
    steps[0] = reduction(CU_STREAM_ATOMIC_REDUCTION_OP_ADD, CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_32, memory + 8, 3);
    steps[1] = reduction(CU_STREAM_ATOMIC_REDUCTION_OP_ADD, CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_32, memory + 12, 2);
    steps[2] = reduction(CU_STREAM_ATOMIC_REDUCTION_OP_AND, CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_64, memory + 16, 0xff00);
    steps[3] = reduction(CU_STREAM_ATOMIC_REDUCTION_OP_OR, CU_STREAM_ATOMIC_REDUCTION_UNSIGNED_32, memory + 16, 7);
    CALL(cuStreamBatchMemOp(streams[0], 4, steps, 0));
    for (int i = 0; i < 2; i++) CALL(cuStreamSynchronize(streams[i]));
    CALL(cuMemcpyDtoH(values, memory, 24));
    CHECK(values[0] == 1 + (2ull * ROUNDS * STEPS << 33));
    CHECK(values[1] == 0x0000000100000003 && values[2] == 0xf007);
    CALL(cuMemFree(memory));
    for (int i = 0; i < 2; i++) CALL(cuStreamDestroy(streams[i]));
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
    zeros();
    virtual_memory();
    host_memory();
    streams();
    rectangles();
    cuboids();
    pools();
    words();
    reductions();
    lookup();
    CALL(cuCtxDestroy(context));
    return failures;
}
