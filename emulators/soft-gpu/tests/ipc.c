/* cuMemAlloc memory shared by two processes: the first writes; the second opens the memory by its handle, reads and
   writes it, and a kernel of the second writes too. Usage: ipc FILE.ptx */
#define _GNU_SOURCE
#include "two_processes.h"

#include <string.h>

/* The allocation ends in the middle of a page and isn't the first one. */
enum { BYTES = 3 * 65536 + 100 };

static unsigned char pattern(int i, int seed) {
    return (unsigned char)(i * 7 + (i >> 8) + seed);
}

/* The file with the kernel. */
static const char *ptx;

static void other_process(int from, int to) {
    CUcontext context;
    CUmodule module;
    CUfunction store;
    CUipcMemHandle handle, wrong;
    CUdeviceptr memory, same, base, other;
    size_t size;
    unsigned char *bytes = malloc(BYTES), done = 1;
    CALL(cuInit(0));
    CALL(cuCtxCreate(&context, 0, 0));
    transfer(from, &handle, sizeof handle, 0);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle(&memory, handle, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle(NULL, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    memset(&wrong, 0x5a, sizeof wrong);
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuIpcOpenMemHandle(&memory, wrong, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    /* Change each byte of the handle in turn. */
    unsigned opened = 0;
    for (size_t i = 0; i < sizeof handle; i++) {
        wrong = handle;
        wrong.reserved[i] ^= 0x40;
        if (cuIpcOpenMemHandle(&other, wrong, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == CUDA_SUCCESS) {
            opened++;
            CALL(cuIpcCloseMemHandle(other));
        }
    }
    /* Those that open have another start or length in the same memory file, or another allocation ID, which the file
     * doesn't know. */
    printf("%u changed handles open\n", opened);
    CHECK(opened < sizeof handle / 2);
    CALL(cuIpcOpenMemHandle(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CALL(cuMemGetAddressRange(&base, &size, memory + 1));
    CHECK(base == memory && size == BYTES);
    CALL(cuMemcpyDtoH(bytes, memory, BYTES));
    unsigned right = 0;
    for (int i = 0; i < BYTES; i++)
        right += bytes[i] == pattern(i, 1);
    CHECK(right == BYTES);
    for (int i = 0; i < BYTES; i++)
        bytes[i] = pattern(i, 2);
    CALL(cuMemcpyHtoD(memory, bytes, BYTES));
    CALL(cuModuleLoad(&module, ptx));
    CALL(cuModuleGetFunction(&store, module, "store"));
    CUdeviceptr last = memory + BYTES - 4;
    unsigned value = 0x01020304;
    void *parameters[] = {&last, &value};
    CALL(cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    CALL(cuCtxSynchronize());

    /* Opening a handle again returns the same address, and each open needs a close. */
    CALL(cuIpcOpenMemHandle(&same, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CHECK(same == memory);
    CALL(cuIpcCloseMemHandle(memory));
    CALL(cuMemcpyDtoH(bytes, memory, 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(memory));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&wrong, memory));
    CALL(cuIpcCloseMemHandle(memory));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle(memory));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(bytes, memory, 1));
    /* Destroying a context closes what it has open. */
    CALL(cuIpcOpenMemHandle(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    CALL(cuCtxDestroy(context));
    transfer(to, &done, 1, 1);
    /* The first process has exited. */
    CALL(cuCtxCreate(&context, 0, 0));
    CHECK(read(from, &done, 1) == 0);
    EXPECT(CUDA_ERROR_MAP_FAILED, cuIpcOpenMemHandle(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    fflush(stdout);
    _exit(failures);
}

/* The process that owns the memory. */
static void owner(int from, int to) {
    CUcontext context;
    CUdeviceptr before, memory, after;
    CUipcMemHandle handle;
    unsigned char *bytes = malloc(BYTES), done;
    int capable = 0;
    CALL(cuInit(0));
    CALL(cuCtxCreate(&context, 0, 0));
    CALL(cuMemAlloc(&before, 1000));
    CALL(cuMemAlloc(&memory, BYTES));
    CALL(cuMemAlloc(&after, 1000));
    CALL(cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, memory));
    CHECK(capable == 1);
    for (int i = 0; i < BYTES; i++)
        bytes[i] = pattern(i, 1);
    CALL(cuMemcpyHtoD(memory, bytes, BYTES));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&handle, memory + 8));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&handle, (CUdeviceptr)(uintptr_t)bytes));
    CALL(cuIpcGetMemHandle(&handle, memory));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenMemHandle(&before, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    transfer(to, &handle, sizeof handle, 1);
    transfer(from, &done, 1, 0);
    CALL(cuMemcpyDtoH(bytes, memory, BYTES));
    unsigned right = 0, value;
    for (int i = 0; i < BYTES - 4; i++)
        right += bytes[i] == pattern(i, 2);
    memcpy(&value, bytes + BYTES - 4, 4);
    CHECK(right == BYTES - 4 && value == 0x01020304);
    fflush(stdout);
    _exit(failures);
}

int main(int argc, char **argv) {
    if (argc != 2)
        return 2;
    ptx = argv[1];
    return in_two_processes(owner, other_process);
}
