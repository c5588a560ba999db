// Shared by the drivers of nccl_ep's kernels: GPU memory and launches through the driver API, numbers of the kernels' types, and what NCCL
// would give the kernels: a device communicator and a window, of the host API's.
#pragma once

#if defined(__CUDA_ARCH__) && (defined(NCCL_OWN_BACKEND) || defined(THROUGH_PROXY))

#include <nccl_device.h>

#elif defined(__CUDA_ARCH__)

#include <ferrogin/nccl_gin.cuh>

#else

#include <cuda.h>
#include <ferrogin/host.hpp>

#include <nccl_device.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#ifdef THROUGH_PROXY
#include "proxy_host.h"
#endif

#endif

// nccl_ep's kernels don't wait until their puts are delivered, so this one does at the end.
struct FlushArguments {
  const ncclDevComm* comm;
  uint32_t contexts;
};

#ifdef __CUDA_ARCH__

extern "C" __global__ void flush(const __grid_constant__ FlushArguments p) {
  for (uint32_t context = 0; context < p.contexts; context++) ncclGin(*p.comm, int(context)).flush(ncclCoopThread());
}

#else

namespace ep {

inline void must(CUresult result, const char* call) {
  const char* name = nullptr;
  if (result == CUDA_SUCCESS) return;
  cuGetErrorName(result, &name);
  throw ferrogin::Error(FERROGIN_CUDA_ERROR, (std::string(call) + " failed: " + (name ? name : "unknown")).c_str());
}
#define MUST(call) ep::must(call, #call)

// GPU memory with `count` values of type T: zeroed and freed with the context, or a part of a window.
template <typename T>
struct Buffer {
  CUdeviceptr address = 0;
  size_t count = 0;

  Buffer() = default;
  explicit Buffer(size_t values) : count(values) {
    MUST(cuMemAlloc(&address, bytes() + 1));
    MUST(cuMemsetD8(address, 0, bytes() + 1));
  }
  Buffer(char* part, size_t values) : address(CUdeviceptr(part)), count(values) {}
  size_t bytes() const {
    return count * sizeof(T);
  }
  T* get() const {
    return reinterpret_cast<T*>(address);
  }
  void set(const std::vector<T>& values) const {
    if (!values.empty()) MUST(cuMemcpyHtoD(address, values.data(), values.size() * sizeof(T)));
  }
  void fill(unsigned char byte) const {
    if (count) MUST(cuMemsetD8(address, byte, bytes()));
  }
  std::vector<T> read() const {
    std::vector<T> values(count);
    if (count) MUST(cuMemcpyDtoH(values.data(), address, bytes()));
    return values;
  }
};

// The kernels, linked with ferrogin's device code.
class Kernels {
  CUmodule module_;

 public:
  Kernels(const std::string& kernels, const std::string& library) {
    CUcontext context;
    CUlinkState link;
    void* image;
    size_t bytes;
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cuCtxSetCurrent(context));
    MUST(cuLinkCreate(0, nullptr, nullptr, &link));
    for (const char* file : {kernels.c_str(), library.c_str()}) must(cuLinkAddFile(link, CU_JIT_INPUT_PTX, file, 0, nullptr, nullptr), file);
    MUST(cuLinkComplete(link, &image, &bytes));
    MUST(cuModuleLoadData(&module_, image));
    MUST(cuLinkDestroy(link));
  }
  // Launches a kernel and waits for it. `kind` is an attribute of the launch, or 0. Cooperative launches are in clusters of two blocks, if
  // there is an even number of blocks, as in the packages' libraries.
  void launch(const char* name, std::vector<void*> parameters, int blocks, int threads, int shared, int kind = 0) const {
    start(name, parameters, blocks, threads, shared, kind);
    must(cuCtxSynchronize(), name);
  }
  void start(const char* name, std::vector<void*> parameters, int blocks, int threads, int shared, int kind) const {
    CUfunction function;
    CUlaunchAttribute attributes[2] = {};
    CUlaunchConfig config{};
    MUST(cuModuleGetFunction(&function, module_, name));
    MUST(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared));
    attributes[0].id = CUlaunchAttributeID(kind);
    attributes[0].value.cooperative = 1;
    attributes[1].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[1].value.clusterDim = {2, 1, 1};
    bool in_clusters = kind == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && blocks % 2 == 0;
    config.gridDimX = blocks, config.blockDimX = threads;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared;
    config.attrs = attributes, config.numAttrs = in_clusters ? 2 : kind != 0;
    must(cuLaunchKernelEx(&config, function, parameters.data(), nullptr), name);
  }
};

// Token types. `round` returns the nearest number that the type has.
struct Bf16 {
  using Bits = uint16_t;
  static Bits bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return Bits((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  static float number(Bits b) {
    uint32_t u = uint32_t(b) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
};
struct Fp16 {
  using Bits = uint16_t;
  static Bits bits(float x) {
    _Float16 half = _Float16(x);
    Bits b;
    std::memcpy(&b, &half, 2);
    return b;
  }
  static float number(Bits b) {
    _Float16 half;
    std::memcpy(&half, &b, 2);
    return float(half);
  }
};
struct Fp32 {
  using Bits = float;
  static Bits bits(float x) {
    return x;
  }
  static float number(Bits b) {
    return b;
  }
};
template <typename Type>
float round_to(float x) {
  return Type::number(Type::bits(x));
}

// The number of an FP8 byte, e4m3.
inline float e4m3(uint8_t b) {
  int exponent = b >> 3 & 15, mantissa = b & 7;
  float magnitude = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
  return b & 0x80 ? -magnitude : magnitude;
}

// A number from 0 to `below` - 1 that depends only on the arguments.
inline uint32_t hash(uint32_t a, uint32_t b, uint32_t c, uint32_t below) {
  uint64_t x = (uint64_t(a) << 40 ^ uint64_t(b) << 20 ^ c) * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 29) * 0xbf58476d1ce4e5b9u;
  return uint32_t((x >> 32) % below);
}

// Options of the command line, as name=number or name=word.
class Options {
  std::vector<std::string> given_;

 public:
  Options(int argc, char** argv) : given_(argv + 1, argv + argc) {}
  std::string word(const std::string& name, const char* usual) {
    for (auto option = given_.begin(); option != given_.end(); ++option) {
      if (option->rfind(name + "=", 0) != 0) continue;
      std::string value = option->substr(name.size() + 1);
      given_.erase(option);
      return value;
    }
    return usual;
  }
  uint32_t number(const std::string& name, uint32_t usual) {
    return uint32_t(std::stoul(word(name, std::to_string(usual).c_str())));
  }
  void end() const {
    if (!given_.empty()) throw std::invalid_argument(given_[0] + " is not an option");
  }
};

// How the tokens of a job choose their experts: every rank computes the choices of all ranks.
struct Routing {
  std::string pattern;  // "even"; "one": every token to the first experts; "none": no token to expert 1; "idle": the last rank has no tokens
  uint32_t ranks, experts, topk, most;

  uint32_t tokens(uint32_t rank) const {
    return pattern == "idle" && rank == ranks - 1 ? 0 : most;
  }
  // The experts of a token, all different. Some tokens use fewer than topk: the rest is -1.
  std::vector<int64_t> experts_of(uint32_t rank, uint32_t token, uint32_t round) const {
    std::vector<int64_t> chosen;
    uint32_t first = hash(rank + 1, token, round, experts), step = 1 + hash(token + 1, rank, round, experts - 1);
    while (std::gcd(step, experts) != 1) step++;
    for (uint32_t k = 0; chosen.size() < topk && k < experts; k++) {
      uint32_t expert = pattern == "one" ? k : (first + k * step) % experts;
      if (pattern != "none" || expert != 1) chosen.push_back(expert);
    }
    if (pattern == "even" && topk > 1 && hash(token, round, rank, 4) == 0) chosen[topk - 1] = -1;
    chosen.resize(topk, -1);
    return chosen;
  }
  // Multiples of 1/8, so that sums of them have no rounding.
  float weight(uint32_t rank, uint32_t token, uint32_t k, uint32_t round) const {
    return float(1 + hash(rank + 7, token * 64 + k, round, 8)) / 8;
  }
  // Integers of up to four bits, which all token types have, FP8 included.
  static float value(uint32_t rank, uint32_t token, uint32_t i, uint32_t round) {
    return float(hash(rank * 1000 + token, i, round, 31)) - 15;
  }
  // What an expert computes.
  static float apply(uint32_t expert, float x) {
    return x * float(1 + expert % 4);
  }
};

// The base of a driver's rank: its options and its kernels, and what NCCL would give those: a window and a device communicator, which are the
// host API's, or with THROUGH_PROXY the RMA plugin's through NCCL's proxy.
struct Driver {
  Options& options;
  std::string ptx = options.word("kernels", "kernels.ptx"), library = options.word("device", "dist/cuda/ferrogin_device.ptx");
  uint32_t rounds = options.number("rounds", 2), strong = options.number("strong", 1);
  ferrogin::Comm comm = ferrogin::Comm::open();
  uint32_t rank = comm.rank(), ranks = comm.ranks(), lsa_rank = comm.lsa().first, lsa_ranks = comm.lsa().second;
  Routing routing;
  Kernels kernels{ptx, library};
  int wrong = 0;

  ferrogin::Window memory;
  char* window = nullptr;
#ifdef THROUGH_PROXY
  std::unique_ptr<ProxyRanks> gin;
#else
  ferrogin::Context gin;
#endif
  Buffer<ncclWindow_vidmem> view{1};
  Buffer<ncclWindow_t> views{1};
  Buffer<ncclDevComm> dev_comm{1};
  Buffer<uint64_t> shadows;
  ncclDevComm host_comm{};

  Driver(Options& given, uint32_t experts, uint32_t topk, uint32_t tokens)
    : options(given), routing{options.word("routing", "even"), ranks, experts, topk, tokens} {}

  // Throws unless the job is the one that the kernels are compiled for. With `per_node` 0, nodes may have any number of ranks.
  void expect_job(uint32_t all, uint32_t per_node, uint32_t most) const {
    auto must_be = [](bool is_right, const std::string& what) {
      if (!is_right) throw std::invalid_argument("compiled for " + what);
    };
    must_be(ranks == all, std::to_string(all) + " ranks");
    must_be(!per_node || lsa_ranks == per_node, std::to_string(per_node) + " ranks per node: set FERROGIN_NODE");
    must_be(routing.most <= most, "at most " + std::to_string(most) + " tokens");
  }

  // The window of a rank of this node.
  char* window_of(uint32_t lsa_rank) const {
    return static_cast<char*>(memory.lsa_address(lsa_rank));
  }

  // As ncclCommWindowRegister and ncclDevCommCreate. If `barriers` isn't 0, that many barriers of the node's ranks are at `barriers_at` in
  // the window, a multiple of 128.
  void open(size_t bytes, uint32_t contexts, uint32_t signals, uint32_t barriers = 0, size_t barriers_at = 0) {
    options.end();
    // NCCL numbers the ranks node by node, equally many on each.
    if (ranks % lsa_ranks || comm.lsa_world_rank(0) % lsa_ranks || rank % lsa_ranks != lsa_rank) {
      throw std::invalid_argument("the ranks of a node have to follow one another: set FERROGIN_NODE");
    }
    memory = comm.allocate(bytes, ferrogin::Memory::Device);
    window = static_cast<char*>(memory.address());
    shadows = Buffer<uint64_t>(size_t(contexts) * signals);
    ncclWindow_vidmem own{};
    own.worldRank = int(rank);
    own.lsaRank = int(lsa_rank);
    own.lsaFlatBase = window_of(0);
    own.stride4G = lsa_ranks > 1 ? uint32_t(uintptr_t(window_of(1) - window_of(0)) >> 32) : 0;
    own.numSegments = 1;
#ifdef THROUGH_PROXY
    gin = through_proxy(comm, window, bytes, int(contexts), int(signals), 0);
    own.ginWinsDefaultBackend[0] = gin->window();
    host_comm.ginNetDeviceTypes[0] = NCCL_NET_DEVICE_GIN_PROXY;
    host_comm.ginHandles[0] = gin->handle();
#else
    ferrogin::ContextOptions limits;
    limits.contexts = contexts;
    limits.signals = signals;
    gin = comm.context(limits);
    own.ginWinsDefaultBackend[0] = memory.handle();
    host_comm.ginNetDeviceTypes[0] = NCCL_NET_DEVICE_GIN_EFA_GDA;
    host_comm.ginHandles[0] = gin.handle();
#endif
    view.set({own});
    views.set({view.get()});

    host_comm.rank = int(rank);
    host_comm.nRanks = int(ranks);
    host_comm.nRanks_rcp32 = nccl::utility::idivRcp32(ranks);
    host_comm.lsaRank = int(lsa_rank);
    host_comm.lsaSize = int(lsa_ranks);
    host_comm.lsaSize_rcp32 = nccl::utility::idivRcp32(lsa_ranks);
    host_comm.resourceWindow_inlined.lsaFlatBase = own.lsaFlatBase;
    host_comm.resourceWindow_inlined.stride4G = own.stride4G;
    host_comm.lsaBarrier = {ncclDevResourceHandle_t(barriers_at / 128), int(barriers)};
    host_comm.ginConnectionCount = 1;
    host_comm.ginConnectionStride = host_comm.ginContextStride = 1;
    host_comm.ginContextCount = contexts;
    host_comm.ginSignalCount = int(signals);
    host_comm.ginSignalShadows = shadows.get();
    // NCCL's default is strong: ncclGin_SignalAdd comes after the puts before it.
    host_comm.ginStrongLegacySignals = strong;
    dev_comm.set({host_comm});
  }

  void expect(bool is_right, const char* what, uint32_t round, size_t where) {
    if (is_right || ++wrong > 5) return;
    std::fprintf(stderr, "rank %u, round %u: wrong %s at %zu\n", rank, round, what, where);
  }

  // The lost ranks, whose loss is acknowledged (FERROGIN_ON_PEER_FAILURE=isolate).
  std::vector<uint32_t> lost() const {
    std::vector<uint32_t> all;
#ifndef THROUGH_PROXY
    all = gin.lost_ranks();
    if (!all.empty()) gin.acknowledge_lost(all);
#endif
    return all;
  }

  // Waits until what the kernels have put is delivered.
  void deliver() const {
    FlushArguments delivered{dev_comm.get(), host_comm.ginContextCount};
    kernels.launch("flush", {&delivered}, 1, 1, 0);
  }

  // Throws if an operation has failed.
  void check() const {
#ifdef THROUGH_PROXY
    if (gin->has_failed()) throw std::runtime_error("an operation of the RMA plugin has failed");
#else
    gin.check();
#endif
  }
};

// The main function of a driver. In each round, `dispatch` and `combine` launch kernels and check what they wrote.
template <typename Rank>
int run(const char* name, int argc, char** argv) try {
  Options options(argc, argv);
  Rank self(options);
  for (uint32_t round = 0; round < self.rounds && !self.wrong; round++) {
    self.prepare(round);
    self.dispatch(round);
    self.combine(round);
    self.check();
  }
  std::printf("%s, rank %u of %u: %u rounds of %u tokens, %d values are wrong\n", name, self.rank, self.ranks, self.rounds,
              self.routing.tokens(self.rank), self.wrong);
  if (self.wrong) return 1;
  self.deliver();
  if (self.lost().empty()) self.comm.barrier();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

}  // namespace ep

#endif
