"""mpi4py messages that their receivers check: pickled objects, buffers, collectives and a window."""

from mpi4py import MPI

world = MPI.COMM_WORLD
rank, ranks = world.rank, world.size
right, left = (rank + 1) % ranks, (rank - 1) % ranks


def pattern(sender, length):
    return bytes((at * 7 + sender * 89 + length) & 0xFF for at in range(length))


def check(what, got, expected):
    if got != expected:
        print(f"rank {rank}: {what}: wrong data", flush=True)
        world.Abort(1)


for length in (0, 1, 4096, 8929, 65536, 1 << 20):
    check("objects", world.sendrecv(["bytes", pattern(rank, length)], right, 1, None, left, 1), ["bytes", pattern(left, length)])
    buffer = bytearray(length)
    world.Sendrecv(pattern(rank, length), right, 2, buffer, left, 2)
    check("buffers", bytes(buffer), pattern(left, length))
check("allreduce", world.allreduce(rank + 1), ranks * (ranks + 1) // 2)
check("alltoall", world.alltoall([(rank, to) for to in range(ranks)]), [(sender, rank) for sender in range(ranks)])
window = MPI.Win.Allocate(1 << 16, comm=world)
window.Fence()
window.Put(pattern(rank, 1 << 16), right)
window.Fence()
check("put", bytes(window.tomemory()), pattern(left, 1 << 16))
window.Free()
if rank == 0:
    print("all data right", flush=True)
