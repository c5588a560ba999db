// A libgdrapi.so.2 for tests: maps the software GPU's memory a second time, as GDRCopy maps a GPU's.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 65536

typedef struct {
  unsigned long h;
} gdr_mh_t;

static int pins, mappings, mapped, connection;

void *gdr_open(void) { return &connection; }

int gdr_close(void *g) { return g == &connection ? 0 : EINVAL; }

// The handle is the descriptor of a dma-buf.
int gdr_pin_buffer(void *g, unsigned long addr, size_t size, uint64_t token, uint32_t space, gdr_mh_t *handle) {
  int fd;
  int (*export)(void *, unsigned long, size_t, int, unsigned long long);
  *(void **)&export = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemGetHandleForAddressRange");
  if (g != &connection || addr % PAGE || size % PAGE || token || space || !export || export(&fd, addr, size, 1, 0))
    return EINVAL;
  pins++;
  handle->h = fd;
  return 0;
}

int gdr_unpin_buffer(void *g, gdr_mh_t handle) {
  pins--;
  return g == &connection ? close(handle.h) : EINVAL;
}

int gdr_map(void *g, gdr_mh_t handle, void **va, size_t size) {
  // The descriptor's position is where the memory starts in its file.
  *va = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, handle.h, lseek(handle.h, 0, SEEK_CUR));
  if (g != &connection || *va == MAP_FAILED) return ENOMEM;
  mappings++;
  mapped++;
  return 0;
}

int gdr_unmap(void *g, gdr_mh_t handle, void *va, size_t size) {
  mappings--;
  return g == &connection && handle.h ? munmap(va, size) : EINVAL;
}

// For the tests: the number of pins and mappings now, and of all mappings so far.
void gdr_test_counts(int counts[3]) {
  counts[0] = pins;
  counts[1] = mappings;
  counts[2] = mapped;
}
