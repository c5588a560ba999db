"""The ranks of mpi4py meet by its allgather, and each sends a value to the next."""

import ferrogin
import numpy
from mpi4py import MPI

world, array = MPI.COMM_WORLD, numpy.zeros(8)
with ferrogin.Comm.open(world.rank, world.size, world.allgather) as comm:
    with comm.register(array) as window, comm.context(signals=1) as context:
        gin = context.gin()
        gin.put_value((comm.rank + 1) % comm.ranks, window, numpy.float64(comm.rank + 0.5), signal=0)
        gin.wait_signal(0)
        gin.flush()
        print(f"rank {comm.rank} of {comm.ranks} received {array[0]}")
        comm.barrier()
