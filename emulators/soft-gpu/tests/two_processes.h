/* A test with two processes that talk over pipes. */
#ifndef SOFT_GPU_TESTS_TWO_PROCESSES_H
#define SOFT_GPU_TESTS_TWO_PROCESSES_H

#include "common.h"

#include <sys/wait.h>
#include <unistd.h>

static void transfer(int fd, void *bytes, size_t count, int write_it) {
    ssize_t done = write_it ? write(fd, bytes, count) : read(fd, bytes, count);
    if (done != (ssize_t)count) {
        printf("FAILED the other process is gone\n");
        exit(101);
    }
}

/* Runs each function in its own process, with descriptors of the pipes from and to the other one. Neither function
   returns. Returns the sum of their exit codes. */
static int in_two_processes(void (*owner)(int from, int to), void (*other)(int from, int to)) {
    int to_owner[2], to_other[2], status = 0, all = 0;
    pid_t processes[2];
    if (pipe(to_owner) != 0 || pipe(to_other) != 0)
        return 2;
    for (int second = 0; second < 2; second++) {
        processes[second] = fork();
        if (processes[second] == 0) {
            close(second ? to_owner[0] : to_owner[1]);
            close(second ? to_other[1] : to_other[0]);
            if (second)
                other(to_other[0], to_owner[1]);
            owner(to_owner[0], to_other[1]);
        }
    }
    close(to_other[1]);
    close(to_owner[1]);
    /* The owner exits first, and stays a zombie while the other process uses what it left behind. */
    for (int second = 1; second >= 0; second--) {
        waitpid(processes[second], &status, 0);
        all += WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    }
    return all;
}

#endif
