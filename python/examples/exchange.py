"""Rank 0 writes an array into the memory of rank 1."""

import ferrogin
import numpy

array = numpy.zeros(1_000_000)
with ferrogin.Comm.open_env() as comm, comm.register(array) as window, comm.context(signals=1) as context:
    gin = context.gin()
    if comm.rank == 0:
        array[:] = numpy.arange(array.size)
        gin.put(1, window, window, signal=0)
        gin.flush()
    else:
        gin.wait_signal(0)
        print(f"rank {comm.rank} received {array}")
    comm.barrier()
