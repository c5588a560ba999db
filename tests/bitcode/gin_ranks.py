"""A rank of a job that runs kernels.cu, linked with a libnccl_device.bc: gin_ranks.py PTX [NODE [STRIDE [va]]]

NODE ranks are on one node, and kernels have GIN connections to every STRIDE-th rank. Each rank checks what the kernels got. With `va`, also puts
with signals in memory.
"""

import ctypes
import struct
import sys

import ferrogin
from driver import EFA_GDA, Kernels, allocate, allocate_flat, load, store

NBYTES, ROUNDS = 4096, 3
GROUPS = ("a thread", "a warp", "a block")
BARRIERS = ("world", "rail", "hybrid")


def pattern(source, target):
    """What a rank sends to another."""
    return bytes((7 * i + 31 * source + 101 * target) % 251 for i in range(NBYTES))


def words(data):
    return struct.unpack(f"<{len(data) // 8}Q", data)


kernels = Kernels(sys.argv[1])
node, stride = (int(number) for number in [*sys.argv[2:], 1, 1][:2])
wrong = []


def check(what, got, expected):
    if got != expected:
        wrong.append(what)


with ferrogin.Comm.open_env() as comm:
    rank, ranks = comm.rank, comm.ranks
    signals = (1 + len(BARRIERS)) * ranks
    size = 3 * ranks * NBYTES + 2 * 8 * ranks
    nbytes, results = ctypes.c_uint64(NBYTES), allocate(8 * (ranks + 1))
    with comm.allocate(size, ferrogin.Memory.DEVICE) as window, comm.context(signals=signals, counters=1) as context:
        memory = ctypes.c_uint64(window.__cuda_array_interface__["data"][0])
        resources = allocate_flat(rank, node, comm.barrier)
        given = kernels.set_up(rank, ranks, signals, EFA_GDA, context.handle, window.handle, memory.value, node, resources, stride)
        for kind, group in enumerate(GROUPS):
            store(memory, b"".join(pattern(rank, peer) for peer in range(ranks)).ljust(size, b"\0"))
            comm.barrier()
            kernels.launch("exchange", 64, *given, nbytes, results, ctypes.c_int(kind))
            comm.barrier()
            got, counts = load(memory, size), words(load(results, 8 * (ranks + 1)))
            parts = [got[at : at + NBYTES] for at in range(0, 3 * ranks * NBYTES, NBYTES)]
            values = words(got[3 * ranks * NBYTES :])
            for peer in set(range(ranks)) - {rank}:
                check(f"what {peer} put, {group}", parts[ranks + peer], pattern(peer, rank))
                check(f"what was got from {peer}, {group}", parts[2 * ranks + peer], pattern(peer, rank))
                check(f"the value of {peer}, {group}", values[peer], peer << 32 | rank)
                check(f"the signal of {peer}, {group}: {counts[peer]}", counts[peer], 7 * (kind + 1))
            check(f"the counter, {group}: {counts[ranks]}", counts[ranks], (ranks - 1) * (kind + 1))
        if sys.argv[4:] == ["va"]:
            store(memory, b"".join(pattern(rank, peer) for peer in range(ranks)).ljust(size, b"\0"))
            comm.barrier()
            kernels.launch("put_with_va_signal", 1, *given, nbytes, results)
            got, counts = load(memory, size), words(load(results, 8 * ranks))
            for peer in set(range(ranks)) - {rank}:
                check(f"what {peer} put with a signal", got[(ranks + peer) * NBYTES :][:NBYTES], pattern(peer, rank))
                check(f"the signal in memory of {peer}: {counts[peer]:#x}", counts[peer], peer + 1 << 33)
            comm.barrier()
        for which, name in enumerate(BARRIERS):
            store(results, bytes(8))
            comm.barrier()
            kernels.launch("barriers", 64, *given, nbytes, results, ctypes.c_int(ROUNDS), ctypes.c_int(which))
            (missed,) = words(load(results, 8))
            check(f"{missed} values after the {name} barrier", missed, 0)
        comm.barrier()
if wrong:
    sys.exit(f"rank {rank}: wrong: {'; '.join(wrong)}")
