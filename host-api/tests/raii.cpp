// Checks host.hpp: who owns what, and how errors travel. Prints the first check that fails.
#include <ferrogin/host.hpp>

#include <cstdio>
#include <cstring>

using namespace ferrogin;

static int failures = 0;
static void expect(bool good, const char* what, int line) {
  if (!good) std::printf("line %d: %s\n", line, what), failures++;
}
#define EXPECT(condition) expect(condition, #condition, __LINE__)

// The status and text of the Error that `call` throws.
template <typename Call>
static bool throws(Call call, int status, const char* text) {
  try {
    call();
  } catch (const Error& error) {
    if (error.status() == status && std::strstr(error.what(), text)) return true;
    std::printf("%d: %s\n", error.status(), error.what());
  }
  return false;
}

struct Unrelated {
  int value;
};

int main() {
  auto alone = [](const void* own, void* all, size_t bytes) { std::memcpy(all, own, bytes); };

  // An exception from the caller's exchange arrives unchanged.
  int caught = 0;
  try {
    Comm::open(0, 1, [](const void*, void*, size_t) { throw Unrelated{42}; });
  } catch (const Unrelated& unrelated) {
    caught = unrelated.value;
  }
  EXPECT(caught == 42);
  EXPECT(throws([&] { Comm::open(3, 2, alone); }, FERROGIN_INVALID_ARGUMENT, "rank 3 is not one of 2 ranks"));
  EXPECT(throws([] { Comm::open("127.0.0.1:1", 9, 2); }, FERROGIN_INVALID_ARGUMENT, "rank 9 is not one of 2 ranks"));
  Options options;
  options.card = 7;
  EXPECT(throws([&] { Comm::open(0, 1, alone, options); }, FERROGIN_INVALID_ARGUMENT, "card 7 does not exist"));

  Comm comm = Comm::open(0, 1, alone);
  EXPECT(comm.rank() == 0 && comm.ranks() == 1);
  comm.barrier();
  EXPECT(throws([&] { comm.allocate(0, Memory::Host); }, FERROGIN_INVALID_ARGUMENT, "a window of 0 bytes"));
  EXPECT(throws([&] { comm.register_dma_buf(&caught, 4, -1, 0); }, FERROGIN_INVALID_ARGUMENT, "file descriptor -1"));
  ContextOptions many;
  many.signals = 1u << 20;
  EXPECT(throws([&] { comm.context(many); }, FERROGIN_INVALID_ARGUMENT, "nSignals"));

  // A moved-from object is empty, and its functions throw.
  static char memory[4096];
  Window window = comm.register_memory(memory, sizeof memory, Memory::Host);
  Window moved = std::move(window);
  EXPECT(window.get() == nullptr && moved.get() != nullptr && moved.host_address() == memory);
  EXPECT(moved.size(0) == sizeof memory);
  EXPECT(throws([&] { moved.size(1); }, FERROGIN_INVALID_ARGUMENT, "rank 1 does not exist"));
  EXPECT(throws([&] { window.handle(); }, FERROGIN_INVALID_ARGUMENT, "the window is NULL"));
  window.close();
  moved.close();
  EXPECT(moved.get() == nullptr);

  // Calls on an object that outlives its communicator throw, but its destructor doesn't.
  Window late = comm.allocate(4096, Memory::Device);
  Context context = comm.context();
  context.check();
  EXPECT(context.handle() != nullptr);
  comm.close();
  EXPECT(throws([&] { late.handle(); }, FERROGIN_INVALID_ARGUMENT, "it was closed"));
  EXPECT(throws([&] { context.close(); }, FERROGIN_INVALID_ARGUMENT, "it was closed"));
  EXPECT(throws([&] { comm.barrier(); }, FERROGIN_INVALID_ARGUMENT, "the communicator is NULL"));
  return failures;
}
