"""A kernel in LLVM's language that sends an array to a peer, linked with the bitcode by llvmlite, without a GPU."""

import sys

import llvmlite.binding as llvm

# An action is {signal + 1, counter + 1, add} in 16, 16 and 32 bits: 4294967297 raises signal 0 by 1.
SEND = """
target triple = "nvptx64-nvidia-cuda"

declare i32 @fgin_open(ptr, i32, ptr)
declare i32 @fgin_put(ptr, i32, ptr, i64, ptr, i64, i64, i64, i32)
declare i32 @fgin_flush(ptr)

define ptx_kernel void @send(ptr %handle, i32 %peer, ptr %window, i64 %bytes, ptr %status) {
  %context = alloca ptr
  %opened = call i32 @fgin_open(ptr %handle, i32 0, ptr %context)
  %failed = icmp ne i32 %opened, 0
  br i1 %failed, label %end, label %post
post:
  %at = load ptr, ptr %context
  %posted = call i32 @fgin_put(ptr %at, i32 %peer, ptr %window, i64 0, ptr %window, i64 0, i64 %bytes, i64 4294967297, i32 0)
  %flushed = call i32 @fgin_flush(ptr %at)
  %both = or i32 %posted, %flushed
  br label %end
end:
  %result = phi i32 [ %opened, %0 ], [ %both, %post ]
  store i32 %result, ptr %status
  ret void
}
"""


def compile_for(kernel, bitcode, gpu):
    """PTX of the kernel and of the functions that it needs, for a GPU that need not be there."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(kernel)
    entries = [function.name for function in module.functions if not function.is_declaration]
    module.link_in(llvm.parse_bitcode(bitcode))
    for function in module.functions:
        if not function.is_declaration and function.name not in entries:
            function.linkage = "internal"
    module.verify()
    target = llvm.Target.from_triple("nvptx64-nvidia-cuda")
    machine = target.create_target_machine(cpu=gpu, features="+ptx82", opt=2)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return machine.emit_assembly(module)


if __name__ == "__main__":
    # The argument is what `python -m ferrogin bitcode` prints.
    with open(sys.argv[1], "rb") as file:
        print(compile_for(SEND, file.read(), "sm_90"))
