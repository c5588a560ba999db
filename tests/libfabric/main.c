// Runs each test in two child processes, and prints PASS or FAIL with the test's name.
#include "pair.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

int pair_socket;

static const struct {
  const char *name;
  void (*run)(void);
} tests[] = {
    {"messages of all lengths", test_messages},
    {"tagged messages", test_tagged},
    {"messages of one packet on efa-direct", test_direct_messages},
    {"replies after the messages that they answer", test_order},
    {"remote memory", test_rma},
    {"remote memory on efa-direct", test_direct_rma},
    {"wide requests", test_wide_requests},
    {"remote memory without a right to it", test_rma_errors},
    {"counters", test_counters},
    {"counters of the card", test_direct_counters},
    {"fi_cq_sread", test_sread},
    {"fi_cq_sread with a threshold", test_threshold},
    {"a descriptor to wait on", test_wait_fd},
    {"a descriptor to wait on, on efa-direct", test_direct_wait_fd},
    {"buffers for several messages", test_multi_recv},
    {"receives that are taken back", test_cancel},
    {"buffers for several messages that are taken back", test_cancel_multi_recv},
    {"endpoints that share a completion queue", test_shared_queue},
    {"a peer that dies", test_dead_peer},
    {"hints", test_hints},
    {"addresses", test_addresses},
    {"calls that make no sense", test_bad_calls},
    {"event queues", test_events},
};

// A test that hangs fails.
enum { SECONDS = 180 };

static int run(int index) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) return 1;
  pid_t pids[2];
  for (int rank = 0; rank < 2; rank++) {
    pids[rank] = fork();
    if (pids[rank] == 0) {
      pair_rank = rank;
      pair_socket = sockets[rank];
      close(sockets[1 - rank]);
      alarm(SECONDS);
      tests[index].run();
      exit(0);
    }
  }
  close(sockets[0]);
  close(sockets[1]);
  int failed = 0;
  for (int rank = 0; rank < 2; rank++) {
    int status;
    if (pids[rank] < 0 || waitpid(pids[rank], &status, 0) < 0 || status) failed = 1;
  }
  return failed;
}

int main(int argc, char **argv) {
  int failed = 0;
  for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
    if (argc > 1 && !strstr(tests[i].name, argv[1])) continue;
    fflush(stdout);
    int bad = run((int)i);
    printf("%s %s\n", bad ? "FAIL" : "PASS", tests[i].name);
    failed += bad;
  }
  return failed ? 1 : 0;
}
