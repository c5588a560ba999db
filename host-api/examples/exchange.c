/* Each rank writes a value into the window of the next rank, and waits for the value of the rank before. */
#include <ferrogin/host.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call) check(call, #call)
static void check(int status, const char *call) {
    if (status) {
        fprintf(stderr, "%s failed: %s\n", call, ferrogin_error());
        exit(1);
    }
}

int main(void) {
    ferrogin_comm *comm;
    ferrogin_window *window;
    ferrogin_context *context;
    uint32_t rank, ranks;
    CHECK(ferrogin_open_env(NULL, &comm));
    CHECK(ferrogin_rank(comm, &rank, &ranks));
    CHECK(ferrogin_window_allocate(comm, 4096, FERROGIN_MEMORY_HOST, &window));
    ferrogin_context_options options = {FERROGIN_CONTEXT_OPTIONS, .signals = 1};
    CHECK(ferrogin_context_create(comm, &options, &context));

    /* A kernel makes these calls with the same two handles; here a CPU thread does. */
    const fgin_context *gin;
    fgin_window memory = ferrogin_window_handle(window);
    CHECK(fgin_open(ferrogin_context_handle(context), 0, &gin));
    CHECK(fgin_put_value(gin, (rank + 1) % ranks, memory, 0, 100 + rank, 8, FGIN_SIGNAL_INC(0), FGIN_DEFAULT));
    CHECK(fgin_wait_signal(gin, 0, 1));
    CHECK(fgin_flush(gin));

    uint64_t value = *(volatile uint64_t *)ferrogin_window_host_address(window);
    printf("rank %u of %u received %llu\n", rank, ranks, (unsigned long long)value);
    CHECK(ferrogin_barrier(comm));
    CHECK(ferrogin_context_destroy(context));
    CHECK(ferrogin_window_free(window));
    CHECK(ferrogin_close(comm));
    return value != 100 + (rank + ranks - 1) % ranks;
}
