/* An event shared by two processes: each records it on its own stream; the other queries it, waits for it, and makes a
   stream wait for it. Usage: events */
#define _GNU_SOURCE
#include "two_processes.h"

#include <string.h>

static const unsigned SHARED = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;

static void tell(int fd) {
    char byte = 1;
    transfer(fd, &byte, 1, 1);
}

static void await(int fd) {
    char byte;
    transfer(fd, &byte, 1, 0);
}

/* Holds a stream until a byte arrives. */
static void hold(void *fd) {
    char byte;
    if (read(*(int *)fd, &byte, 1) < 0)
        abort();
}

static void set(void *flag) {
    *(volatile int *)flag = 1;
}

/* Records the event on a held stream, and releases the stream when the other process has seen the event. */
static void record(CUevent event, int from, int to) {
    CUstream stream;
    int gate[2];
    if (pipe(gate) != 0)
        exit(102);
    CALL(cuStreamCreate(&stream, 1));
    CALL(cuLaunchHostFunc(stream, hold, &gate[0]));
    CALL(cuEventRecord(event, stream));
    EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(event));
    tell(to);
    await(from);
    tell(gate[1]);
    CALL(cuEventSynchronize(event));
    CALL(cuStreamDestroy(stream));
    tell(to);
}

/* Waits for the event recorded by the other process, which doesn't record it again until then. */
static void follow(CUevent event, int from, int to) {
    CUstream stream;
    volatile int flag = 0;
    CALL(cuStreamCreate(&stream, 1));
    await(from);
    EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(event));
    CALL(cuStreamWaitEvent(stream, event, 0));
    CALL(cuLaunchHostFunc(stream, set, (void *)&flag));
    usleep(20000);
    EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    CHECK(flag == 0);
    tell(to);
    CALL(cuEventSynchronize(event));
    CALL(cuStreamSynchronize(stream));
    CHECK(flag == 1);
    EXPECT(CUDA_SUCCESS, cuEventQuery(event));
    CALL(cuStreamDestroy(stream));
    await(from);
}

static void other_process(int from, int to) {
    CUcontext context;
    CUipcEventHandle handle, wrong;
    CUevent event, again, timed;
    CUstream stream;
    float time;
    CALL(cuInit(0));
    CALL(cuCtxCreate(&context, 0, 0));
    transfer(from, &handle, sizeof handle, 0);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcOpenEventHandle(NULL, handle));
    memset(&wrong, 0x5a, sizeof wrong);
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuIpcOpenEventHandle(&event, wrong));
    /* Change each byte of the handle in turn: none of these handles opens anything. */
    unsigned opened = 0;
    for (size_t i = 0; i < sizeof handle; i++) {
        wrong = handle;
        wrong.reserved[i] ^= 0x40;
        opened += cuIpcOpenEventHandle(&event, wrong) == CUDA_SUCCESS;
    }
    CHECK(opened == 0);
    CALL(cuIpcOpenEventHandle(&event, handle));
    CALL(cuIpcOpenEventHandle(&again, handle));
    EXPECT(CUDA_SUCCESS, cuEventQuery(event));
    tell(to);
    /* The event has no timestamps. */
    CALL(cuEventCreate(&timed, 0));
    CALL(cuEventRecord(timed, NULL));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&time, timed, event));
    follow(event, from, to);
    record(again, from, to);
    /* Every record counts, whoever made it. */
    follow(again, from, to);
    CALL(cuEventDestroy(again));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(again));
    tell(to);
    /* The first process exits while its stream is held: no wait hangs. */
    await(from);
    EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(event));
    CALL(cuStreamCreate(&stream, 0));
    CALL(cuStreamWaitEvent(stream, event, 0));
    tell(to);
    EXPECT(CUDA_ERROR_UNKNOWN, cuEventSynchronize(event));
    EXPECT(CUDA_ERROR_UNKNOWN, cuStreamSynchronize(stream));
    CALL(cuCtxDestroy(context));
    CALL(cuCtxCreate(&context, 0, 0));
    EXPECT(CUDA_ERROR_MAP_FAILED, cuIpcOpenEventHandle(&event, handle));
    fflush(stdout);
    _exit(failures);
}

/* The process that creates the event. */
static void owner(int from, int to) {
    CUcontext context;
    CUipcEventHandle handle;
    CUevent event, local, opened;
    CUstream stream;
    int gate[2];
    if (pipe(gate) != 0)
        exit(102);
    CALL(cuInit(0));
    CALL(cuCtxCreate(&context, 0, 0));
    CALL(cuEventCreate(&local, CU_EVENT_DISABLE_TIMING));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuEventCreate(&event, CU_EVENT_INTERPROCESS));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcGetEventHandle(&handle, local));
    CALL(cuEventCreate(&event, SHARED));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuIpcGetEventHandle(NULL, event));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuIpcGetEventHandle(&handle, (CUevent)&handle));
    CALL(cuIpcGetEventHandle(&handle, event));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenEventHandle(&opened, handle));
    transfer(to, &handle, sizeof handle, 1);
    await(from);
    record(event, from, to);
    follow(event, from, to);
    record(event, from, to);
    await(from);
    CALL(cuStreamCreate(&stream, 1));
    CALL(cuLaunchHostFunc(stream, hold, &gate[0]));
    CALL(cuEventRecord(event, stream));
    tell(to);
    await(from);
    fflush(stdout);
    _exit(failures);
}

int main(void) {
    return in_two_processes(owner, other_process);
}
