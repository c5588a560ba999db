/* A program that runs kernels through the driver API alone. Usage: kernels FILE.ptx. It also builds with NVIDIA's
 * cuda.h. */
#include "common.h"

#include <string.h>

enum { COUNT = 1000 };

/* Scales COUNT numbers on a stream and checks the results. */
static void scale(CUmodule module) {
    CUfunction function;
    CUstream stream;
    CUdeviceptr to, from, launches;
    size_t bytes;
    CALL(cuModuleGetFunction(&function, module, "scale"));
    CALL(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CALL(cuMemAlloc(&from, COUNT * 4));
    CALL(cuMemAlloc(&to, COUNT * 4));
    unsigned numbers[COUNT], results[COUNT], count = COUNT, counted = 0;
    for (unsigned i = 0; i < COUNT; i++)
        numbers[i] = i * i;
    CALL(cuMemcpyHtoDAsync(from, numbers, sizeof numbers, stream));
    void *parameters[] = {&to, &from, &count};
    CALL(cuLaunchKernel(function, 8, 1, 1, 128, 1, 1, 0, stream, parameters, NULL));
    CALL(cuMemcpyDtoHAsync(results, to, sizeof results, stream));
    CALL(cuStreamSynchronize(stream));
    unsigned right = 0;
    for (unsigned i = 0; i < COUNT; i++)
        right += results[i] == 3 * i * i + i;
    CHECK(right == COUNT);
    CALL(cuModuleGetGlobal(&launches, &bytes, module, "launches"));
    CALL(cuMemcpyDtoH(&counted, launches, 4));
    CHECK(bytes == 4 && counted == 5 + COUNT);

    /* Pass the parameters as one buffer. */
    struct {
        CUdeviceptr to, from;
        unsigned count;
    } packed = {to, from, 2};
    size_t size = 20;
    void *extra[] = {(void *)1, &packed, (void *)2, &size, NULL};
    CALL(cuMemsetD8(to, 0, COUNT * 4));
    CALL(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, extra));
    CALL(cuMemcpyDtoH(results, to, sizeof results));
    CHECK(results[0] == 0 && results[1] == 4 && results[2] == 0);
    CALL(cuMemFree(to));
    CALL(cuMemFree(from));
    CALL(cuStreamDestroy(stream));
}

/* A library, whose kernel handles work in every context. */
static void library(const char *path) {
    CUlibrary library, same;
    CUkernel kernel, kernels[8];
    CUfunction function;
    CUmodule module, again;
    CUcontext mine, other;
    CUdeviceptr memory, launches, elsewhere;
    unsigned count = 0, value = 9, seen = 0;
    size_t bytes, offset, size;
    int attribute = 0;
    const char *name = NULL;
    CALL(cuLibraryLoadFromFile(&library, path, NULL, NULL, 0, NULL, NULL, 0));
    CALL(cuLibraryGetKernelCount(&count, library));
    CALL(cuLibraryEnumerateKernels(kernels, count, library));
    CHECK(count == 4);
    CALL(cuLibraryGetKernel(&kernel, library, "store"));
    CALL(cuKernelGetName(&name, kernel));
    CHECK(strcmp(name, "store") == 0);
    CALL(cuKernelGetLibrary(&same, kernel));
    CALL(cuKernelGetParamInfo(kernel, 1, &offset, &size));
    CHECK(same == library && offset == 8 && size == 4);
    CALL(cuMemAlloc(&memory, 4));
    void *parameters[] = {&memory, &value};
    CALL(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    CALL(cuMemcpyDtoH(&seen, memory, 4));
    CHECK(seen == 9);

    /* An attribute applies to existing and future contexts. */
    CALL(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 100000, kernel, 0));
    CALL(cuKernelGetFunction(&function, kernel));
    CALL(cuFuncGetAttribute(&attribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function));
    CALL(cuFuncGetName(&name, function));
    CHECK(attribute == 100000 && strcmp(name, "store") == 0);
    CALL(cuLibraryGetModule(&module, library));
    CALL(cuLibraryGetModule(&again, library));
    CHECK(module == again && cuModuleUnload(module) == CUDA_ERROR_NOT_PERMITTED);
    CALL(cuLibraryGetGlobal(&launches, &bytes, library, "launches"));
    CALL(cuCtxGetCurrent(&mine));
    CALL(cuCtxCreate(&other, 0, 0));
    CALL(cuLibraryGetModule(&again, library));
    CALL(cuLibraryGetGlobal(&elsewhere, &bytes, library, "launches"));
    CHECK(module != again && launches != elsewhere && bytes == 4);
    CALL(cuFuncGetAttribute(&attribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (CUfunction)kernel));
    CHECK(attribute == 100000);
    value = 11;
    CALL(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 100000, NULL, parameters, NULL));
    CALL(cuCtxSynchronize());
    CALL(cuCtxDestroy(other));
    CALL(cuMemcpyDtoH(&seen, memory, 4));
    CHECK(seen == 11);
    CALL(cuLibraryUnload(library));
    CHECK(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL) == CUDA_ERROR_INVALID_HANDLE);
    CALL(cuMemFree(memory));
}

/* A kernel that waits for the host while another stream works. */
static void wait_for_host(CUmodule module) {
    CUfunction wait, store;
    CUstream one, other;
    volatile unsigned *host;
    CUdeviceptr flag;
    CALL(cuModuleGetFunction(&wait, module, "wait"));
    CALL(cuModuleGetFunction(&store, module, "store"));
    CALL(cuStreamCreate(&one, CU_STREAM_NON_BLOCKING));
    CALL(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    CALL(cuMemHostAlloc((void **)&host, 8, 2));
    CALL(cuMemHostGetDevicePointer(&flag, (void *)host, 0));
    host[0] = host[1] = 0;
    unsigned value = 77;
    void *of_wait[] = {&flag, &value};
    CALL(cuLaunchKernel(wait, 1, 1, 1, 1, 1, 1, 0, one, of_wait, NULL));
    CUdeviceptr second = flag + 4;
    void *of_store[] = {&second, &value};
    CALL(cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, other, of_store, NULL));
    CALL(cuStreamSynchronize(other));
    CHECK(host[1] == 77);
    CHECK(cuStreamQuery(one) == CUDA_ERROR_NOT_READY);
    host[0] = 77;
    CALL(cuStreamSynchronize(one));
    CALL(cuMemFreeHost((void *)host));
    CALL(cuStreamDestroy(one));
    CALL(cuStreamDestroy(other));
}

/* The linker combines several texts into an image. */
static void link_texts(const char *path) {
    static char more[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                         ".visible .entry nothing()\n{\n    ret;\n}\n";
    CUlinkState link;
    CUmodule module;
    CUfunction function;
    void *image;
    size_t bytes;
    CALL(cuLinkCreate(0, NULL, NULL, &link));
    CALL(cuLinkAddFile(link, CU_JIT_INPUT_PTX, path, 0, NULL, NULL));
    CALL(cuLinkAddData(link, CU_JIT_INPUT_PTX, more, sizeof more, "more.ptx", 0, NULL, NULL));
    CALL(cuLinkComplete(link, &image, &bytes));
    CALL(cuModuleLoadData(&module, image));
    CALL(cuLinkDestroy(link));
    CALL(cuModuleGetFunction(&function, module, "nothing"));
    CALL(cuLaunchKernel(function, 2, 2, 2, 4, 4, 4, 0, NULL, NULL, NULL));
    CALL(cuCtxSynchronize());
    CALL(cuModuleGetFunction(&function, module, "scale"));
    CALL(cuModuleUnload(module));
}

/* A cooperative grid of clusters, whose threads meet at the barrier that the driver provides. */
static void clusters(void) {
    static char text[] = ".version 8.0\n.target sm_90\n.address_size 64\n"
                         ".visible .entry meet(.param .u64 to)\n{\n"
                         "    .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<4>;\n"
                         "    ld.param.u64 %d1, [to]; mov.u32 %r1, %envreg1; mov.u32 %r2, %envreg2; mov.b64 %d2, {%r2, %r1};\n"
                         "    atom.add.release.gpu.global.u32 %r3, [%d2+4], 1;\n"
                         "AGAIN:\n    ld.acquire.gpu.global.u32 %r3, [%d2+4]; setp.ne.u32 %p, %r3, 4; @%p bra AGAIN;\n"
                         "    mov.u32 %r4, %ctaid.x; mov.u32 %r5, %cluster_ctarank; mov.u32 %r6, %clusterid.x;\n"
                         "    shl.b32 %r6, %r6, 8; or.b32 %r5, %r5, %r6; mul.wide.u32 %d3, %r4, 4; add.u64 %d1, %d1, %d3;\n"
                         "    st.global.u32 [%d1], %r5; ret;\n}\n";
    int major = 0;
    CUmodule module;
    CUfunction function;
    CUdeviceptr memory;
    size_t before, after, total;
    unsigned found[4];
    CALL(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    if (major < 9)
        return;
    CALL(cuModuleLoadData(&module, text));
    CALL(cuModuleGetFunction(&function, module, "meet"));
    CALL(cuMemAlloc(&memory, sizeof found));
    CUlaunchAttribute attributes[3];
    memset(attributes, 0, sizeof attributes);
    attributes[0].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[0].value.cooperative = 1;
    attributes[1].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[1].value.clusterDim.x = 2;
    attributes[1].value.clusterDim.y = attributes[1].value.clusterDim.z = 1;
    attributes[2].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[2].value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config;
    memset(&config, 0, sizeof config);
    config.gridDimX = 4;
    config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1;
    config.attrs = attributes;
    config.numAttrs = 3;
    void *parameters[] = {&memory};
    CALL(cuMemGetInfo(&before, &total));
    for (int launch = 0; launch < 2; launch++) {
        CALL(cuMemsetD8(memory, 0xff, sizeof found));
        CALL(cuLaunchKernelEx(&config, function, parameters, NULL));
        CALL(cuMemcpyDtoH(found, memory, sizeof found));
        CHECK(found[0] == 0 && found[1] == 1 && found[2] == 0x100 && found[3] == 0x101);
    }
    CALL(cuMemGetInfo(&after, &total));
    CHECK(before == after);
    config.gridDimX = 3;
    EXPECT(CUDA_ERROR_INVALID_CLUSTER_SIZE, cuLaunchKernelEx(&config, function, parameters, NULL));
    attributes[1].value.clusterDim.x = 0;
    EXPECT(CUDA_ERROR_INVALID_CLUSTER_SIZE, cuLaunchKernelEx(&config, function, parameters, NULL));
    CALL(cuMemFree(memory));
    CALL(cuModuleUnload(module));
}

/* Launches a kernel that does something illegal; the context's error is sticky. */
static void wrong(CUresult code, const char *path, const char *kernel, CUdeviceptr (*address)(void)) {
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUdeviceptr at;
    unsigned value = 1;
    CALL(cuCtxCreate(&context, 0, 0));
    CALL(cuModuleLoad(&module, path));
    CALL(cuModuleGetFunction(&function, module, kernel));
    at = address();
    void *parameters[] = {&at, &value};
    CALL(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    EXPECT(code, cuCtxSynchronize());
    EXPECT(code, cuCtxSynchronize());
    EXPECT(code, cuMemAlloc(&at, 4));
    EXPECT(code, cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL));
    CALL(cuCtxDestroy(context));
}

static CUdeviceptr null(void) {
    return 0;
}

static CUdeviceptr of_host(void) {
    static int word;
    return (CUdeviceptr)(uintptr_t)&word;
}

static CUdeviceptr freed(void) {
    CUdeviceptr memory;
    CALL(cuMemAlloc(&memory, 64));
    CALL(cuMemFree(memory));
    return memory;
}

static CUdeviceptr past_end(void) {
    CUdeviceptr memory;
    CALL(cuMemAlloc(&memory, 64));
    return memory + 64;
}

static CUdeviceptr unregistered(void) {
    static int word[1024];
    CALL(cuMemHostRegister(word, sizeof word, 0));
    CALL(cuMemHostUnregister(word));
    return (CUdeviceptr)(uintptr_t)word;
}

static CUdeviceptr mapped_read_only(void) {
    CUmemAllocationProp prop;
    CUmemGenericAllocationHandle handle;
    CUmemAccessDesc access;
    CUdeviceptr address;
    size_t bytes;
    memset(&prop, 0, sizeof prop);
    memset(&access, 0, sizeof access);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
    CALL(cuMemGetAllocationGranularity(&bytes, &prop, 0));
    CALL(cuMemCreate(&handle, bytes, &prop, 0));
    CALL(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CALL(cuMemMap(address, bytes, 0, handle, 0));
    CALL(cuMemSetAccess(address, bytes, &access, 1));
    return address;
}

static CUdeviceptr misaligned(void) {
    return past_end() - 62;
}

int main(int argc, char **argv) {
    CUcontext context;
    CUmodule module;
    if (argc != 2)
        return 2;
    CALL(cuInit(0));
    CALL(cuDevicePrimaryCtxRetain(&context, 0));
    CALL(cuCtxSetCurrent(context));
    CALL(cuModuleLoad(&module, argv[1]));
    scale(module);
    wait_for_host(module);
    library(argv[1]);
    link_texts(argv[1]);
    clusters();
    CALL(cuModuleUnload(module));
    CALL(cuDevicePrimaryCtxRelease(0));
    const struct {
        CUresult code;
        const char *kernel;
        CUdeviceptr (*address)(void);
    } rows[] = {
        {CUDA_ERROR_ILLEGAL_ADDRESS, "store", null},          {CUDA_ERROR_ILLEGAL_ADDRESS, "store", of_host},
        {CUDA_ERROR_ILLEGAL_ADDRESS, "store", freed},         {CUDA_ERROR_ILLEGAL_ADDRESS, "store", past_end},
        {CUDA_ERROR_ILLEGAL_ADDRESS, "store", unregistered},  {CUDA_ERROR_ILLEGAL_ADDRESS, "store", mapped_read_only},
        {716, "store", misaligned},                           {CUDA_ERROR_LAUNCH_FAILED, "fail", null},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        wrong(rows[i].code, argv[1], rows[i].kernel, rows[i].address);
    return failures;
}
