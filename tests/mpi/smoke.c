/* An MPI program whose ranks check every byte that they receive: smoke [ROUNDS]
 *
 * Takes two or more ranks. Each prints what it finds wrong and aborts the job; rank 0 prints one line if all is
 * right. */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

/* Above every protocol's limit for short messages, and not a multiple of a page or packet. */
#define LONG 80000
#define BURST 100

static int rank, ranks;

/* Byte i of message number n from a rank. */
static unsigned char byte_of(int from, int n, int i) {
    return (unsigned char)(from * 89 + n * 31 + i * 7 + (i >> 8));
}

static void fill(unsigned char *bytes, int len, int from, int n) {
    for (int i = 0; i < len; i++)
        bytes[i] = byte_of(from, n, i);
}

static void check(const char *what, const unsigned char *bytes, int len, int from, int n) {
    for (int i = 0; i < len; i++)
        if (bytes[i] != byte_of(from, n, i)) {
            fprintf(stderr, "rank %d: %s: byte %d of %d from rank %d, number %d, is %d and must be %d\n", rank, what, i, len, from, n,
                    bytes[i], byte_of(from, n, i));
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
}

static int right(void) {
    return (rank + 1) % ranks;
}

static int left(void) {
    return (rank + ranks - 1) % ranks;
}

/* Each rank sends to the next, and all send at once. */
static void send_receive(unsigned char *out, unsigned char *in) {
    static const int lengths[] = {0, 1, 64, 4096, 8900, 9000, 65536, LONG, 1 << 20};
    for (unsigned n = 0; n < sizeof lengths / sizeof *lengths; n++) {
        int count;
        MPI_Status status;
        fill(out, lengths[n], rank, n);
        MPI_Sendrecv(out, lengths[n], MPI_BYTE, right(), n, in, 1 << 20, MPI_BYTE, left(), n, MPI_COMM_WORLD, &status);
        MPI_Get_count(&status, MPI_BYTE, &count);
        if (count != lengths[n]) {
            fprintf(stderr, "rank %d: a message of %d bytes arrived with %d\n", rank, lengths[n], count);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        check("MPI_Sendrecv", in, lengths[n], left(), n);
    }
}

/* Bursts of messages of all lengths, received in reverse order of their tags. */
static void burst(unsigned char *out, unsigned char *in) {
    MPI_Request requests[2 * BURST];
    int length = 10007;
    for (int n = 0; n < BURST; n++)
        MPI_Irecv(in + (BURST - 1 - n) * length, length, MPI_BYTE, left(), BURST - 1 - n, MPI_COMM_WORLD, &requests[n]);
    for (int n = 0; n < BURST; n++) {
        fill(out + n * length, n * 100 + 7, rank, n);
        MPI_Isend(out + n * length, n * 100 + 7, MPI_BYTE, right(), n, MPI_COMM_WORLD, &requests[BURST + n]);
    }
    MPI_Waitall(2 * BURST, requests, MPI_STATUSES_IGNORE);
    for (int n = 0; n < BURST; n++)
        check("MPI_Isend", in + n * length, n * 100 + 7, left(), n);
}

static void reduce(void) {
    enum { COUNT = 20000 };
    static long mine[COUNT], sum[COUNT];
    for (int i = 0; i < COUNT; i++)
        mine[i] = (long)i * (rank + 1);
    MPI_Allreduce(mine, sum, COUNT, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < COUNT; i++)
        if (sum[i] != (long)i * ranks * (ranks + 1) / 2) {
            fprintf(stderr, "rank %d: MPI_Allreduce: sum %d is %ld\n", rank, i, sum[i]);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
}

/* Each rank puts into the next one's window and gets from it, between fences and with a lock. */
static void one_sided(unsigned char *out, unsigned char *in) {
    static const int lengths[] = {8, 5000, LONG};
    unsigned char *memory;
    MPI_Win window;
    MPI_Win_allocate(2 * LONG, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
    for (unsigned n = 0; n < sizeof lengths / sizeof *lengths; n++) {
        fill(out, lengths[n], rank, n);
        MPI_Win_fence(0, window);
        MPI_Put(out, lengths[n], MPI_BYTE, right(), 0, lengths[n], MPI_BYTE, window);
        MPI_Win_fence(0, window);
        check("MPI_Put", memory, lengths[n], left(), n);
        MPI_Get(in, lengths[n], MPI_BYTE, right(), 0, lengths[n], MPI_BYTE, window);
        MPI_Win_fence(0, window);
        check("MPI_Get", in, lengths[n], rank, n);
    }
    fill(out, LONG, rank, 9);
    MPI_Win_lock(MPI_LOCK_SHARED, right(), 0, window);
    MPI_Put(out, LONG, MPI_BYTE, right(), LONG, LONG, MPI_BYTE, window);
    MPI_Win_flush(right(), window);
    MPI_Get(in, LONG, MPI_BYTE, right(), LONG, LONG, MPI_BYTE, window);
    MPI_Win_unlock(right(), window);
    check("MPI_Win_lock", in, LONG, rank, 9);
    /* A window is freed while both ranks send. */
    MPI_Request requests[2];
    fill(out, LONG, rank, 10);
    MPI_Irecv(in, LONG, MPI_BYTE, left(), 10, MPI_COMM_WORLD, &requests[0]);
    MPI_Isend(out, LONG, MPI_BYTE, right(), 10, MPI_COMM_WORLD, &requests[1]);
    MPI_Win_free(&window);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    check("MPI_Win_free", in, LONG, left(), 10);
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 3;
    unsigned char *out, *in;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    out = malloc(2 << 20);
    in = malloc(2 << 20);
    if (ranks < 2 || !out || !in) {
        fprintf(stderr, "rank %d: the program needs two ranks and memory\n", rank);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    for (int round = 0; round < rounds; round++) {
        send_receive(out, in);
        burst(out, in);
        reduce();
        one_sided(out, in);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0)
        printf("smoke: %d ranks, %d rounds, all data right\n", ranks, rounds);
    MPI_Finalize();
    return 0;
}
