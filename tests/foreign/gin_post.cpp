// gin_post VECTORS/efa_dp.json
//
// Tests the shim: replays the vectors in section gin_post, which were recorded from NCCL's device code, with the same code compiled
// here. Every request in a ring, every doorbell and every cursor must match. The card is a hook below the MMIO stores, and completes
// requests at once.
#include "device_code.h"
#include "json.h"

#include <stdarg.h>
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>

namespace {

std::string where;

[[noreturn]] void fail(const char* format, ...) {
  char text[2048];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  printf("FAIL %s: %s\n", where.c_str(), text);
  exit(1);
}

std::string hex(const unsigned char* p, size_t n) {
  std::string out;
  char two[3];
  for (size_t i = 0; i < n; i++) {
    snprintf(two, sizeof(two), "%02x", p[i]);
    out += two;
  }
  return out;
}

// One endpoint: the handle that NCCL's code reads and the memory behind it.
struct Endpoint {
  std::string name;
  uint32_t entries;
  uint32_t wqe_size;
  uint64_t counter;
  uint32_t doorbell = 0;
  std::vector<unsigned char> ring;
  std::vector<uint16_t> ah, qpn;
  std::vector<uint32_t> qkey;
  efa_cuda_qp qp = {};
  nccl_ofi_gin_gdaki_dev_counter_handle handle = {};

  Endpoint(const Json& v, uint64_t pool) {
    name = v["name"].text;
    entries = uint32_t(v["entries"].number());
    wqe_size = uint32_t(v["wqe_size"].number());
    ring.assign(size_t(entries) * wqe_size, 0);
    for (const Json& n : v["targets"]["ah"].items) ah.push_back(uint16_t(n.number()));
    for (const Json& n : v["targets"]["qpn"].items) qpn.push_back(uint16_t(n.number()));
    for (const Json& n : v["targets"]["qkey"].items) qkey.push_back(uint32_t(n.number()));
    const Json& start = v["start"];
    auto& wq = qp.sq.wq;
    wq.max_wqes = entries;
    wq.queue_mask = entries - 1;
    wq.queue_size_shift = uint32_t(__builtin_ctz(entries));
    wq.max_batch = uint32_t(v["max_batch"].number());
    wq.pc = uint32_t(start["pc"].number());
    wq.wqes_completed = uint32_t(start["released"].number());
    wq.wqes_posted = uint32_t(start["rung"].number());
    wq.buf = ring.data();
    wq.db = &doorbell;
#if FOREIGN_BACKEND_VERSION == 2
    qp.sq.wr_ctx.wqe_size = uint16_t(wqe_size);
    qp.sq.wr_ctx.remote_mem_offset = 32;
    qp.sq.wr_ctx.local_mem_offset = 48;
    qp.sq.wr_ctx.sgl_offset = 32;
    qp.sq.wr_ctx.send_inline_data_offset = 32;
    qp.sq.wr_ctx.write_inline_data_offset = wqe_size == 128 ? 48 : 0;
    qp.sq.wr_ctx.max_inline_data = wqe_size == 128 ? 80 : 32;
    qp.sq.wr_ctx.max_rdma_sges = 1;
#endif
    counter = start["counter"].number();
    auto& ep = handle.base;
    ep.qp = &qp;
    ep.target_address_handles = ah.data();
    ep.target_remote_qpns = qpn.data();
    ep.target_qkey = qkey.data();
    ep.local_cntr_value = &counter;
    ep.submitted_count = start["submitted"].number();
    ep.sq_size = entries;
    ep.putvalue_slice_base = pool;
    handle.cntr_value = &counter;
  }

  std::string state() const {
    const auto& wq = qp.sq.wq;
    char text[256];
    snprintf(text, sizeof(text), "pc %u released %u rung %u submitted 0x%llx counter %llu", wq.pc, wq.wqes_completed,
             wq.wqes_posted, (unsigned long long)handle.base.submitted_count, (unsigned long long)counter);
    return text;
  }
};

struct Event {
  Endpoint* endpoint;
  std::string text;
};

std::vector<std::unique_ptr<Endpoint>> endpoints;
std::vector<Event> events;
std::mutex events_lock;

// The card: records stores, and completes requests when a doorbell is rung.
void on_store(uint64_t addr, uint64_t value, unsigned bytes) {
  std::lock_guard<std::mutex> guard(events_lock);
  for (auto& ep : endpoints) {
    auto ring = uint64_t(ep->ring.data());
    if (bytes == 4 && addr == uint64_t(&ep->doorbell)) {
      uint32_t rung = uint32_t(value) - ep->qp.sq.wq.wqes_posted;
      __atomic_store_n(&ep->counter, (ep->counter + rung) & 0x7fffffff, __ATOMIC_RELEASE);
      events.push_back({ep.get(), "doorbell " + std::to_string(value)});
      return;
    }
    if (bytes == 8 && addr >= ring && addr < ring + ep->ring.size()) {
      size_t offset = size_t(addr - ring);
      if (offset % ep->wqe_size != ep->wqe_size - 8) return;
      size_t slot = offset / ep->wqe_size;
      events.push_back({ep.get(), "slot " + std::to_string(slot) + " " + hex(&ep->ring[slot * ep->wqe_size], ep->wqe_size)});
      return;
    }
  }
  fail("a store of %u bytes to nowhere", bytes);
}

struct Replay {
  const Json& v;
  nccl_ofi_gin_gdaki_dev_handle dev = {};
  std::vector<nccl_ofi_gin_gdaki_dev_counter_handle*> counters, signals;
  std::vector<nccl_ofi_gin_gdaki_dev_counter_handle> signal_handles;
  std::vector<uint64_t> signal_values;
  std::vector<uint64_t> remote_addrs;
  std::vector<uint32_t> remote_rkeys;
  // [window][rail], and the blocks that the elements point to.
  std::vector<std::vector<void*>> windows;
  std::vector<std::vector<uint64_t>> blocks;
  ncclGinCtx ctx = {};

  explicit Replay(const Json& vector, unsigned char* pool) : v(vector) {
    endpoints.clear();
    for (const Json& e : v["endpoints"].items) endpoints.push_back(std::make_unique<Endpoint>(e, uint64_t(pool)));
    size_t nranks = v["nranks"].number();
    for (const Json& value : v["signal_counters"].items) signal_values.push_back(value.number());
    signal_handles.resize(signal_values.size());
    for (size_t i = 0; i < signal_values.size(); i++) {
      signal_handles[i].cntr_value = &signal_values[i];
      signals.push_back(&signal_handles[i]);
    }
    for (const Json& a : v["scratch"]["remote_addrs"].items) remote_addrs.push_back(a.number());
    for (const Json& k : v["scratch"]["remote_rkeys"].items) remote_rkeys.push_back(uint32_t(k.number()));
    for (const Json& window : v["windows"].items) {
      std::vector<void*> rails;
      for (const Json& rail : window.items) {
        blocks.emplace_back((sizeof(nccl_ofi_gin_gdaki_mr_handle) + nranks * sizeof(nccl_ofi_gin_gdaki_mr_peer)) / 8);
        auto* mr = (nccl_ofi_gin_gdaki_mr_handle*)blocks.back().data();
        mr->lkey = uint32_t(rail["lkey"].number());
        mr->nranks = int32_t(nranks);
        mr->local_addr = rail["local_addr"].number();
        for (size_t r = 0; r < nranks; r++) {
          mr->peers[r].remote_addr = rail["peers"][r]["addr"].number();
          mr->peers[r].rkey = uint32_t(rail["peers"][r]["rkey"].number());
        }
        rails.push_back(mr);
      }
      windows.push_back(rails);
    }
    for (size_t i = 2; i < endpoints.size(); i++) counters.push_back(&endpoints[i]->handle);
    dev.data = endpoints[0]->handle.base;
    dev.pvdata = endpoints[1]->handle.base;
    dev.counter_handles = counters.data();
    dev.signal_handles = signals.data();
    dev.nCounters = int32_t(counters.size());
    dev.nSignals = int32_t(signals.size());
    dev.nranks = int32_t(nranks);
    dev.rank = int32_t(v["rank"].number());
    dev.rail_id = uint32_t(v["rail"].number());
    dev.scratch_lkey = uint32_t(v["scratch"]["lkey"].number());
    dev.scratch_local_addr = v["scratch"]["local_addr"].number();
    dev.scratch_remote_addrs = remote_addrs.data();
    dev.scratch_remote_rkeys = remote_rkeys.data();
    dev.putvalue_lkey = uint32_t(v["putvalue"]["lkey"].number());
    dev.putvalue_slot_size = uint32_t(v["putvalue"]["slot_size"].number());
    ctx.backendMask = 1u << int(NCCL_NET_DEVICE_GIN_EFA_GDA);
    ctx.backend = NCCL_NET_DEVICE_GIN_EFA_GDA;
    ctx.rank = dev.rank;
    ctx.nRanks = dev.nranks;
    ctx.handle = &dev;
    ctx.resourceSharingMode =
      v["mode"].text == "cta" ? NCCL_GIN_RESOURCE_SHARING_CTA : NCCL_GIN_RESOURCE_SHARING_GPU;
  }

  // `dev` has copies of the first two endpoints' structs.
  std::string state_of(size_t i) {
    if (i == 0) endpoints[0]->handle.base.submitted_count = dev.data.submitted_count;
    if (i == 1) endpoints[1]->handle.base.submitted_count = dev.pvdata.submitted_count;
    return endpoints[i]->state();
  }

  void lane(const Json& call, const Json& l) {
    ncclGinSignalDescriptor signal = {};
    ncclGinSignalOp_t op = ncclGinSignalInc;
    uint64_t arg = 0;
    if (!l["signal"].is_null()) {
      signal.type = NCCL_GIN_SIGNAL_TYPE_INDEXED;
      signal.indexedSignal.signalId = uint32_t(l["signal"]["id"].number());
      op = l["signal"]["op"].text == "add" ? ncclGinSignalAdd : ncclGinSignalInc;
      arg = l["signal"]["arg"].number();
    }
    auto window = [&](const char* name) { return (ncclGinWindow_t)windows.at(l[name].number()).data(); };
    uint32_t flags = l["aggregate"].truth() ? ncclGinOptFlagsAggregateRequests : ncclGinOptFlagsDefault;
    int peer = int(l["peer"].number());
    constexpr auto scope = cuda::thread_scope_thread;
    if (call["call"].text == "put") {
      bool has_counter = !l["counter"].is_null();
      ncclGinCall<ncclGinApi_Put>(ctx, ncclCoopThread(), peer, l["has_windows"].truth(), window("dst_window"),
                                  size_t(l["dst_off"].number()), window("src_window"), size_t(l["src_off"].number()),
                                  size_t(l["bytes"].number()), signal, op, arg, has_counter,
                                  ncclGinCounter_t(has_counter ? l["counter"].number() : 0), false,
                                  (ncclGinDescriptorSmem*)nullptr, scope, scope, flags);
    } else if (call["call"].text == "get") {
      ncclGinCall<ncclGinApi_Get>(ctx, ncclCoopThread(), peer, window("remote_window"),
                                  size_t(l["remote_off"].number()), window("local_window"),
                                  size_t(l["local_off"].number()), size_t(l["bytes"].number()), false,
                                  (ncclGinDescriptorSmem*)nullptr, flags);
    } else {
      auto put_value = [&](auto value) {
        ncclGinCall<ncclGinApi_PutValue>(ctx, ncclCoopThread(), peer, window("dst_window"),
                                         size_t(l["dst_off"].number()), value, signal, op, arg, false,
                                         (ncclGinDescriptorSmem*)nullptr, scope, scope, flags);
      };
      uint64_t value = l["value"].number();
      switch (call["size"].number()) {
        case 1: return put_value(uint8_t(value));
        case 2: return put_value(uint16_t(value));
        case 4: return put_value(uint32_t(value));
        default: return put_value(value);
      }
    }
  }

  // The lanes of a warp run as threads that synchronize where the device code does.
  void lanes(const Json& call) {
    const auto& all = call["lanes"].items;
    if (all.size() == 1) return lane(call, all[0]);
    shim::Warp warp(unsigned(all.size()));
    std::vector<std::thread> threads;
    for (size_t i = 0; i < all.size(); i++) {
      threads.emplace_back([&, i] {
        shim::warp = &warp;
        shim::lane = unsigned(i);
        threadIdx.x = unsigned(i);
        lane(call, all[i]);
      });
    }
    for (std::thread& t : threads) t.join();
  }

  void compare_events(const Json& call) {
    bool one_lane = call["lanes"].items.size() <= 1;
    std::vector<std::string> expected, got;
    auto add = [&](std::vector<std::string>& to, const std::string& endpoint, const std::string& text) {
      to.push_back(endpoint + ": " + text);
    };
    for (const Json& e : call["expect"]["events"].items) {
      add(expected, e["ep"].text,
          e["wqe"].is_null() ? "doorbell " + e["doorbell"].text : "slot " + e["slot"].text + " " + e["wqe"].text);
    }
    for (const Event& e : events) add(got, e.endpoint->name, e.text);
    if (!one_lane) {
      // Lanes write concurrently, so requests between two doorbells, or on different queues, have no order.
      for (auto* list : {&expected, &got}) {
        std::stable_sort(list->begin(), list->end(), [](const std::string& a, const std::string& b) {
          return a.substr(0, a.find(':')) < b.substr(0, b.find(':'));
        });
        auto doorbell = [](const std::string& s) { return s.find(": doorbell") != std::string::npos; };
        for (auto from = list->begin(); from != list->end();) {
          auto to = std::find_if(from, list->end(), doorbell);
          std::sort(from, to);
          from = to == list->end() ? to : to + 1;
        }
      }
    }
    for (size_t i = 0; i < std::max(expected.size(), got.size()); i++) {
      if (i < expected.size() && i < got.size() && expected[i] == got[i]) continue;
      fail("event %zu:\n  got      %s\n  expected %s", i, i < got.size() ? got[i].c_str() : "nothing",
           i < expected.size() ? expected[i].c_str() : "nothing");
    }
  }

  void run() {
    int number = 0;
    for (const Json& call : v["calls"].items) {
      const std::string& name = call["call"].text;
      where = v["id"].text + " (" + v["kind"].text + "), call " + std::to_string(number++) + " " + name;
      std::vector<std::string> before;
      for (size_t i = 0; i < endpoints.size(); i++) before.push_back(state_of(i));
      events.clear();
      if (name == "flush") {
        ncclGinCall<ncclGinApi_Flush>(ctx, ncclCoopThread(), false, (ncclGinDescriptorSmem*)nullptr,
                                      cuda::memory_order_acquire, (uint32_t*)nullptr);
      } else if (name == "read_signal" || name == "reset_signal") {
        auto id = uint32_t(call["id"].number());
        signal_values.at(id) = call["counter"].number();
        if (name == "reset_signal") {
          ncclGinSignalDescriptor signal = {};
          signal.type = NCCL_GIN_SIGNAL_TYPE_INDEXED;
          signal.indexedSignal.signalId = id;
          ncclGinCall<ncclGinApi_ResetSignal>(ctx, signal);
        } else {
          ncclGinOffsetPtr p = ncclGinCall<ncclGinApi_GetSignalPtr>(ctx, id);
          if (*p.ptr != call["counter"].number() || p.offset != call["expect"]["offset"].number()) fail("wrong value");
        }
      } else if (name == "read_counter" || name == "reset_counter") {
        auto id = uint32_t(call["id"].number());
        if (name == "reset_counter") {
          ncclGinCall<ncclGinApi_ResetCounter>(ctx, id);
        } else {
          ncclGinOffsetPtr p = ncclGinCall<ncclGinApi_GetCounterPtr>(ctx, id);
          if (*p.ptr != call["counter"].number() || p.offset != call["expect"]["offset"].number()) fail("wrong value");
        }
      } else if (name == "put" || name == "put_value" || name == "get") {
        lanes(call);
      } else {
        fail("unknown call");
      }
      compare_events(call);
      for (size_t i = 0; i < endpoints.size(); i++) {
        const Json& s = call["expect"]["state"][endpoints[i]->name.c_str()];
        std::string expected = before[i];
        if (!s.is_null()) {
          expected = "pc " + s["pc"].text + " released " + s["released"].text + " rung " + s["rung"].text +
                     " submitted " + s["submitted"].text + " counter " + s["counter"].text;
        }
        std::string got = state_of(i);
        if (got != expected) fail("%s:\n  got      %s\n  expected %s", endpoints[i]->name.c_str(), got.c_str(), expected.c_str());
      }
      for (const Json& s : call["expect"]["staged"].items) {
        std::string got = hex((const unsigned char*)s["addr"].number(), s["bytes"].text.size() / 2);
        if (got != s["bytes"].text) fail("staged %s, expected %s", got.c_str(), s["bytes"].text.c_str());
      }
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: gin_post VECTORS/efa_dp.json\n");
    return 2;
  }
  std::ifstream file(argv[1]);
  if (!file) {
    fprintf(stderr, "gin_post: cannot read %s\n", argv[1]);
    return 2;
  }
  std::stringstream text;
  text << file.rdbuf();
  Json vectors = Json::parse(text.str());
  char release[32];
  snprintf(release, sizeof(release), "%d.%d.%d", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH);
  alarm(120);
  shim::mmio_hook = on_store;
  int cases = 0, calls = 0;
  for (const Json& v : vectors["gin_post"].items) {
    if (v["release"].text != release) continue;
    // NCCL 2.31's requests contain the value pool's address, so it must be the recorded one.
    auto* wanted = (void*)v["putvalue"]["pool_addr"].number();
    auto* pool = (unsigned char*)mmap(wanted, 1 << 20, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    where = v["id"].text;
    if (pool != wanted) fail("cannot map memory at %p", wanted);
    Replay(v, pool).run();
    munmap(pool, 1 << 20);
    cases++;
    calls += int(v["calls"].items.size());
  }
  if (cases == 0) {
    printf("FAIL gin_post: the vectors have no case for NCCL %s\n", release);
    return 1;
  }
  printf("PASS NCCL %s, gin_post: %d cases, %d calls as recorded\n", release, cases, calls);
  return 0;
}
