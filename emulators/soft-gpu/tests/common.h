/* Checks for this directory's programs. Each prints a line; the exit code is the number of failed checks. */
#ifndef SOFT_GPU_TESTS_COMMON_H
#define SOFT_GPU_TESTS_COMMON_H

#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>

static int failures;

static void check(int good, const char *what, int line) {
    printf("%s %s (line %d)\n", good ? "ok" : "FAILED", what, line);
    failures += !good;
}

#define CHECK(condition) check((condition), #condition, __LINE__)

static inline const char *name_of(CUresult result) {
    const char *name = "?";
    cuGetErrorName(result, &name);
    return name;
}

/* Checks that the call returns the code. */
#define EXPECT(code, call)                                                              \
    do {                                                                                \
        CUresult result = (call);                                                       \
        check(result == (code), #call " is " #code, __LINE__);                          \
        if (result != (code))                                                           \
            printf("       it is %s\n", name_of(result));                               \
    } while (0)

/* Exits if the call fails, since what follows depends on it. */
#define CALL(call)                                                                      \
    do {                                                                                \
        CUresult result = (call);                                                       \
        if (result != CUDA_SUCCESS) {                                                   \
            printf("FAILED %s: %s (line %d)\n", #call, name_of(result), __LINE__);      \
            exit(100);                                                                  \
        }                                                                               \
    } while (0)

#endif
