/* A CUDA driver with one GPU, for tests that fail before the first allocation. */
#include <stddef.h>

static int context;

int cuInit(unsigned flags) { return flags != 0; }
int cuGetErrorName(int error, const char **name) { *name = error ? "CUDA_ERROR" : "CUDA_SUCCESS"; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { (void)attribute, (void)device; *value = 90; return 0; }
int cuCtxGetCurrent(void **current) { *current = NULL; return 0; }
int cuDevicePrimaryCtxRetain(void **retained, int device) { (void)device; *retained = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxPushCurrent_v2(void *pushed) { return pushed != &context; }
int cuCtxPopCurrent_v2(void **popped) { *popped = &context; return 0; }
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = &context; return 0; }
int cuStreamDestroy_v2(void *stream) { return stream != &context; }
