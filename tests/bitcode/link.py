"""Links kernels with a libnccl_device.bc and writes their PTX: link.py KERNELS BITCODE PTX [--strip-tbaa] [-O0|-O1|-O2]"""

import re
import sys
from pathlib import Path

import llvmlite.binding as llvm

kernels, bitcode, ptx, *options = sys.argv[1:]
level = next((int(option[2]) for option in options if option.startswith("-O")), 2)
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
module = llvm.parse_bitcode(Path(kernels).read_bytes())
entries = set(re.findall(r"define .*ptx_kernel .*@(\w+)\(", str(module)))


def hide():
    for value in [*module.functions, *module.global_variables]:
        if not value.is_declaration and value.name not in entries:
            value.linkage = "internal"


# NCCL's headers define functions in the kernels' module, too.
hide()
module.link_in(llvm.parse_bitcode(Path(bitcode).read_bytes()))
hide()
machine = llvm.Target.from_triple("nvptx64-nvidia-cuda").create_target_machine(cpu="sm_90", features="+ptx87", opt=level)
unused = llvm.create_new_module_pass_manager()
unused.add_global_dead_code_eliminate_pass()
unused.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
if "--strip-tbaa" in options:
    module = llvm.parse_assembly(re.sub(r", !tbaa(?:\.struct)? !\d+", "", str(module)))
passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=level))
passes.getModulePassManager().run(module, passes)
text = machine.emit_assembly(module)
undefined = [name for name in re.findall(r"\.extern \.func .*?(\w+)\s*\n?\(", text) if name not in ("__assertfail", "vprintf")]
if undefined:
    sys.exit(f"undefined: {undefined}")
Path(ptx).write_text(text)
