// What a launcher tells a rank, and how two ranks on one host meet. C++17, Linux.
#pragma once

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct Variable {
  const char* name = nullptr;
  long value = -1;
};

// The first of these variables that is a number.
template <size_t N>
static Variable first_of(const char* const (&names)[N]) {
  for (const char* name : names) {
    const char* text = getenv(name);
    char* end = nullptr;
    if (!text || !*text) continue;
    long value = strtol(text, &end, 10);
    if (*end == 0 && value >= 0) return {name, value};
  }
  return {};
}

// In this order: a script, Open MPI, MPICH and Intel MPI, Slurm, torchrun.
struct Launcher {
  Variable rank = first_of({"FERROGIN_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "RANK"});
  Variable ranks = first_of({"FERROGIN_NRANKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE"});
  Variable local = first_of({"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK"});

  Launcher() {
    // Across hosts, every launcher except a script sets the local rank.
    if (!local.name) local = rank;
  }

  // Returns whether this is one of two ranks; if not, prints how to start them.
  bool started_two_ranks() const {
    if (!ranks.name || !rank.name) {
      fprintf(stderr, "two_ranks: no launcher started this process: run mpirun -np 2 PROGRAM\n");
    } else if (ranks.value != 2 || rank.value > 1) {
      fprintf(stderr, "two_ranks: this is rank %ld of %ld, but the test has two ranks: run mpirun -np 2 PROGRAM\n", rank.value, ranks.value);
    } else {
      return true;
    }
    return false;
  }
};

// Two ranks on one host, which meet at an abstract socket named after their job.
class Meeting {
 public:
  // Waits for the other rank; after `seconds`, or if a call fails, `is_open` returns false.
  Meeting(long rank, int seconds) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::string name = "ferrogin-two-ranks-" + job();
    memcpy(address.sun_path + 1, name.data(), name.size() < 100 ? name.size() : 100);
    auto size = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + (name.size() < 100 ? name.size() : 100));
    auto* at = reinterpret_cast<sockaddr*>(&address);
    int one = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    timeval limit{seconds, 0};
    setsockopt(one, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (rank == 0) {
      if (bind(one, at, size) == 0 && listen(one, 1) == 0) stream = accept(one, nullptr, nullptr);
      close(one);
      setsockopt(stream, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
      return;
    }
    for (int tries = 0; tries < seconds * 100 && stream < 0; tries++) {
      if (connect(one, at, size) == 0) stream = one;
      else usleep(10 * 1000);
    }
  }
  ~Meeting() {
    if (stream >= 0) close(stream);
  }
  Meeting(const Meeting&) = delete;

  bool is_open() const {
    return stream >= 0;
  }

  // Both ranks send `mine` and receive the other's.
  bool exchange(const void* mine, void* others, size_t bytes) const {
    return send(stream, mine, bytes, MSG_NOSIGNAL) == ssize_t(bytes) && recv(stream, others, bytes, 0) == ssize_t(bytes);
  }

 private:
  static std::string job() {
    for (const char* name : {"FERROGIN_BOOTSTRAP", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "MASTER_PORT"}) {
      if (const char* value = getenv(name)) return value;
    }
    return "parent-" + std::to_string(getppid());
  }

  int stream = -1;
};
