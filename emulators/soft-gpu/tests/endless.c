/* A kernel that waits for a value that is never written. Usage: endless FILE.ptx, with SOFTGPU_WATCHDOG set. */
#include "common.h"

int main(int argc, char **argv) {
    CUcontext context;
    CUmodule module;
    CUfunction wait;
    CUdeviceptr word;
    unsigned value = 9;
    if (argc != 2)
        return 2;
    CALL(cuInit(0));
    CALL(cuCtxCreate(&context, 0, 0));
    CALL(cuModuleLoad(&module, argv[1]));
    CALL(cuModuleGetFunction(&wait, module, "wait"));
    CALL(cuMemAlloc(&word, 4));
    CALL(cuMemsetD8(word, 0, 4));
    void *parameters[] = {&word, &value};
    CALL(cuLaunchKernel(wait, 1, 1, 1, 2, 1, 1, 0, NULL, parameters, NULL));
    EXPECT(CUDA_ERROR_LAUNCH_TIMEOUT, cuCtxSynchronize());
    EXPECT(CUDA_ERROR_LAUNCH_TIMEOUT, cuMemAlloc(&word, 4));
    return failures;
}
