"""A Triton kernel that doubles a block of an array and sends it to a peer, compiled without a GPU."""

import ferrogin.triton as gin
import triton
import triton.language as tl


@triton.jit
def send(array, handle, scratch, peer, window, statuses, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(array + at, tl.load(array + at) * 2)
    context = gin.open(handle, 0, scratch)
    # The window begins at the array, on each rank. The peer waits until its signal 0 is the number of programs.
    offset = tl.cast(program, tl.int64) * BLOCK * 4
    status = gin.put(context, peer, window, offset, window, offset, BLOCK * 4, gin.signal_inc(0))
    if status == 0:
        status = gin.flush(context)
    tl.store(statuses + program, status)


@triton.jit
def announce(context, peer, window, value, statuses):
    status = gin.put_value(context, peer, window, 0, value, action=gin.signal_add(1, 5))
    tl.store(statuses, status | gin.wait_signal(context, 1, 5) | gin.flush(context))


def compile_for(kernel, signature, capability, **constants):
    """Compiles for a GPU that need not be there. A launch is `kernel[grid](..., extern_libs=gin.extern_libs())`."""
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"extern_libs": gin.extern_libs()})


if __name__ == "__main__":
    types = {"array": "*fp32", "handle": "i64", "scratch": "*i64", "peer": "i32", "window": "i64", "statuses": "*i32"}
    compiled = compile_for(send, {**types, "BLOCK": "constexpr"}, 90, BLOCK=1024)
    print(f"the cubin for sm_90 has {len(compiled.asm['cubin'])} bytes")
