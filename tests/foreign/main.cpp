// foreign PLUGIN [--proxy] [--ranks N] [--scenario NAME|all|failures] [--except NAME]... [--list]
//
// Loads a GIN plugin as NCCL does and uses its handles with NCCL's own device code. Prints PASS, FAIL or SKIP for each scenario; exits with
// status 1 if a scenario failed, 2 for invalid arguments.
// `failures` are scenarios of two ranks, one of which has a fault or a limit of its own; `all` are the others. With --proxy, kernels use
// the library's RMA plugin, through NCCL's proxy.
#include "scenarios.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <set>

static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

void fill(void* where, size_t bytes, uint64_t seed) {
  auto* p = (unsigned char*)where;
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t word = mix(seed + i);
    memcpy(p + i, &word, bytes - i < 8 ? bytes - i : 8);
  }
}

ptrdiff_t first_difference(const void* where, size_t bytes, uint64_t seed) {
  auto* p = (const unsigned char*)where;
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t word = mix(seed + i);
    for (size_t k = 0; k < 8 && i + k < bytes; k++) {
      if (p[i + k] != ((unsigned char*)&word)[k]) return ptrdiff_t(i + k);
    }
  }
  return -1;
}

static int usage() {
  fprintf(stderr, "usage: foreign PLUGIN [--proxy] [--ranks N] [--scenario NAME|all|failures] [--except NAME]... [--list]\n");
  return 2;
}

int main(int argc, char** argv) {
  int ranks = 2;
  bool list = false;
  std::string wanted = "all";
  std::set<std::string> except;
  for (int i = 1; i < argc; i++) {
    std::string arg = argv[i];
    if (arg == "--ranks" && i + 1 < argc) {
      ranks = atoi(argv[++i]);
    } else if (arg == "--scenario" && i + 1 < argc) {
      wanted = argv[++i];
    } else if (arg == "--except" && i + 1 < argc) {
      except.insert(argv[++i]);
    } else if (arg == "--proxy") {
      through_proxy = true;
    } else if (arg == "--list") {
      list = true;
    } else if (plugin_path.empty() && arg[0] != '-') {
      plugin_path = arg;
    } else {
      return usage();
    }
  }
  std::vector<Scenario> all;
  const auto& own = through_proxy ? strong_scenarios : plugin_scenarios;
  for (const auto* group : {&data_scenarios, &signal_scenarios, &stress_scenarios, &lifecycle_scenarios, &own}) {
    all.insert(all.end(), group->begin(), group->end());
  }
  if (list) {
    for (const auto& group : {all, failure_scenarios()}) {
      for (const Scenario& s : group) puts(s.name);
    }
    return 0;
  }
  if (wanted == "failures") {
    all = failure_scenarios();
    wanted = "all";
  } else if (wanted != "all") {
    auto failures = failure_scenarios();
    all.insert(all.end(), failures.begin(), failures.end());
  }
  if (plugin_path.empty() || ranks < 2 || ranks > max_ranks) return usage();
  // dlopen would search the library path for a name without a slash.
  char* absolute = realpath(plugin_path.c_str(), nullptr);
  if (!absolute) {
    fprintf(stderr, "foreign: %s: no such file\n", plugin_path.c_str());
    return 2;
  }
  plugin_path = absolute;
  free(absolute);

  // The plugin reports once per card that it has only 64-byte requests.
  expect_warnings = !values_work();
  int run = 0, failed = 0;
  for (const Scenario& s : all) {
    if ((wanted != "all" && wanted != s.name) || except.count(s.name)) continue;
    run++;
    char name[256];
    snprintf(name, sizeof(name), "NCCL %d.%d.%d%s, %d ranks, %s%s%s", NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH,
             through_proxy ? ", proxy" : "", ranks, faults(), *faults() ? ", " : "", s.name);
    const char* why = s.skip ? s.skip(ranks) : nullptr;
    if (!why && s.values && !values_work()) why = "this release's putValue needs 128-byte requests";
    if (why) {
      printf("SKIP %s: %s\n", name, why);
    } else {
      long long start = clock64();
      bool good = run_ranks(s.name, ranks, s.seconds, s.body);
      failed += !good;
      printf("%s %s (%.1f s)\n", good ? "PASS" : "FAIL", name, double(clock64() - start) / 1e9);
    }
    fflush(stdout);
  }
  if (run == 0) {
    fprintf(stderr, "foreign: no scenario %s; --list names them\n", wanted.c_str());
    return 2;
  }
  return failed ? 1 : 0;
}
