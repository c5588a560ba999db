// Launches the kernels of this directory, one after the other, on two ranks: driver KERNELS.ptx DEVICE.ptx NAME...
//
// Each kernel has a window and contexts of its own. Prints how many values a kernel found wrong.
extern "C" {
#include <cuda.h>
}
#include <ferrogin/host.hpp>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

using namespace ferrogin;

struct Args {
  void* handle;
  fgin_window window;
  CUdeviceptr bytes, memory, wrong;
  uint32_t rank, peer;
  fgin_window freed;
};

constexpr size_t WINDOW = 64 << 10, MEMORY = 4 << 10;

static void must(CUresult result, const char* call) {
  const char* name = nullptr;
  if (result == CUDA_SUCCESS) return;
  cuGetErrorName(result, &name);
  throw Error(FERROGIN_CUDA_ERROR, (std::string(call) + " failed: " + (name ? name : "unknown")).c_str());
}
#define MUST(call) must(call, #call)

static bool begins(const std::string& name, const char* with) {
  return name.compare(0, std::strlen(with), with) == 0;
}

class Kernels {
  CUmodule module_;

 public:
  explicit Kernels(std::vector<const char*> files) {
    CUcontext context;
    CUlinkState link;
    void* image;
    size_t bytes;
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cuCtxSetCurrent(context));
    MUST(cuLinkCreate(0, nullptr, nullptr, &link));
    for (const char* file : files) must(cuLinkAddFile(link, CU_JIT_INPUT_PTX, file, 0, nullptr, nullptr), file);
    MUST(cuLinkComplete(link, &image, &bytes));
    MUST(cuModuleLoadData(&module_, image));
    MUST(cuLinkDestroy(link));
  }

  // Launches a kernel; false if there is none of that name.
  bool launch(const std::string& name, Args args) const {
    CUfunction function;
    CUresult found = cuModuleGetFunction(&function, module_, name.c_str());
    if (found == CUDA_ERROR_NOT_FOUND) return false;
    must(found, name.c_str());
    void* parameters[] = {&args};
    must(cuLaunchKernel(function, begins(name, "grid_") ? 2 : 1, 1, 1, 128, 1, 1, 0, nullptr, parameters, nullptr), name.c_str());
    return true;
  }
};

static void run(const Kernels& kernels, const Comm& comm, const std::string& name, CUdeviceptr memory) {
  auto window = comm.allocate(WINDOW, Memory::Device);
  CUdeviceptr memory_freed = 0;
  Window freed;
  if (begins(name, "freed_")) {
    MUST(cuMemAlloc(&memory_freed, WINDOW));
    freed = comm.register_memory(reinterpret_cast<void*>(memory_freed), WINDOW, Memory::Device);
  }
  ContextOptions options;
  options.contexts = 2;
  options.signals = options.counters = 4;
  auto context = comm.context(options);
  auto bytes = reinterpret_cast<CUdeviceptr>(window.address());
  MUST(cuMemsetD8(memory, 0, MEMORY));
  MUST(cuCtxSynchronize());
  comm.barrier();

  Args args{context.handle(), window.handle(), bytes, memory, memory + MEMORY - 4, comm.rank(), 1 - comm.rank(), freed.get() ? freed.handle() : nullptr};
  if (!kernels.launch(name, args)) throw Error(FERROGIN_INVALID_ARGUMENT, ("no kernel is called " + name).c_str());
  MUST(cuCtxSynchronize());
  if (freed.get()) {
    try {
      freed.close();
    } catch (const Error&) {
      // The window is in use, and this program frees its memory all the same.
    }
    MUST(cuMemFree(memory_freed));
  }
  uint32_t wrong = 0;
  if (begins(name, "host_")) {
    // The host reads what the peer's kernel put.
    uint32_t received = 0;
    comm.barrier();
    MUST(cuMemcpyDtoH(&received, bytes, sizeof received));
    wrong += received != 100 + args.peer;
  }
  comm.barrier();
  if (kernels.launch(name + "_then", args)) MUST(cuCtxSynchronize());
  comm.barrier();
  try {
    context.check();
    context.close();
  } catch (const Error& error) {
    // The peer has closed its context before this rank's last requests were there.
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
    wrong++;
  }
  comm.barrier();
  uint32_t counted = 0;
  MUST(cuMemcpyDtoH(&counted, args.wrong, sizeof counted));
  std::printf("%s: %u values are wrong\n", name.c_str(), wrong + counted);
  std::fflush(stdout);
}

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::fprintf(stderr, "usage: driver KERNELS.ptx DEVICE.ptx NAME...\n");
    return 2;
  }
  auto comm = Comm::open();
  Kernels kernels({argv[1], argv[2]});
  CUdeviceptr memory;
  MUST(cuMemAlloc(&memory, MEMORY));
  for (int n = 3; n < argc; n++) run(kernels, comm, argv[n], memory);
  comm.barrier();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
