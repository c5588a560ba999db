#include "ranks.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void (*on_timeout)() = nullptr;

static const char* current_scenario = "";
int this_rank = -1;

static void give_up_if_failed(const Rank& rank) {
  if (__atomic_load_n(&rank.shared->failed, __ATOMIC_ACQUIRE)) _exit(2);
}

void Rank::barrier() const {
  uint32_t generation = __atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_ACQ_REL) == uint32_t(nranks)) {
    __atomic_store_n(&shared->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&shared->generation, generation + 1, __ATOMIC_RELEASE);
    return;
  }
  while (__atomic_load_n(&shared->generation, __ATOMIC_ACQUIRE) == generation) {
    give_up_if_failed(*this);
    usleep(50);
  }
}

void Rank::allgather(const void* mine, size_t bytes, void* all) const {
  if (bytes > sizeof(shared->slot[0])) fail(__FILE__, __LINE__, "allgather of %zu bytes", bytes);
  memcpy(shared->slot[rank], mine, bytes);
  barrier();
  for (int r = 0; r < nranks; r++) memcpy((char*)all + r * bytes, shared->slot[r], bytes);
  barrier();
}

void Rank::fail(const char* file, int line, const char* format, ...) const {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  const char* name = strrchr(file, '/');
  fprintf(stderr, "  %s, rank %d of %d, %s:%d: %s\n", scenario, rank, nranks, name ? name + 1 : file, line, text);
  fflush(stderr);
  __atomic_store_n(&shared->failed, 1, __ATOMIC_RELEASE);
  _exit(1);
}

static void time_is_up(int) {
  dprintf(2, "  %s, rank %d: time is up\n", current_scenario, this_rank);
  if (on_timeout) on_timeout();
  _exit(3);
}

bool run_ranks(const char* scenario, int nranks, unsigned seconds, void (*body)(Rank&)) {
  void* page = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) {
    fprintf(stderr, "  %s: mmap: %s\n", scenario, strerror(errno));
    return false;
  }
  fflush(nullptr);
  pid_t pids[max_ranks];
  for (int r = 0; r < nranks; r++) {
    pids[r] = fork();
    if (pids[r] == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      current_scenario = scenario;
      this_rank = r;
      signal(SIGALRM, time_is_up);
      alarm(5 * seconds);
      Rank rank{r, nranks, scenario, (Shared*)page};
      body(rank);
      fflush(nullptr);
      // exit, not _exit: the plugin's exit handlers are part of the test.
      exit(0);
    }
    if (pids[r] < 0) {
      fprintf(stderr, "  %s: fork: %s\n", scenario, strerror(errno));
      for (int k = 0; k < r; k++) kill(pids[k], SIGKILL);
      while (wait(nullptr) > 0) {
      }
      return false;
    }
  }
  bool good = true;
  bool killed = false;
  time_t kill_at = 0;
  for (int left = nranks; left > 0;) {
    int status = 0;
    pid_t pid = waitpid(-1, &status, WNOHANG);
    if (pid == 0) {
      if (kill_at && time(nullptr) > kill_at) {
        killed = true;
        for (int r = 0; r < nranks; r++) {
          if (pids[r]) kill(pids[r], SIGKILL);
        }
      }
      usleep(2000);
      continue;
    }
    if (pid < 0) break;
    int r = 0;
    while (r < nranks && pids[r] != pid) r++;
    if (r == nranks) continue;
    pids[r] = 0;
    left--;
    if (status == 0) continue;
    good = false;
    ((Shared*)page)->failed = 1;
    // The other ranks notice at their next barrier; a rank that spins in device code is killed a little later.
    if (!kill_at) kill_at = time(nullptr) + 5;
    if (WIFSIGNALED(status) && !(killed && WTERMSIG(status) == SIGKILL)) {
      fprintf(stderr, "  %s, rank %d: killed by signal %d (%s)\n", scenario, r, WTERMSIG(status),
              strsignal(WTERMSIG(status)));
    }
  }
  munmap(page, sizeof(Shared));
  return good;
}
