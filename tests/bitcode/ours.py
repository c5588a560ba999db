"""Links ferrogin's bitcode with a kernel, by the LLVM of this environment's llvmlite: ours.py BITCODE"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "python/examples"))
import llvmlite.binding as llvm  # noqa: E402
import llvmlite_kernel  # noqa: E402

bitcode = Path(sys.argv[1]).read_bytes()
release = ".".join(map(str, llvm.llvm_version_info))


def judge(name, wrong):
    print(f"FAIL LLVM {release}, {name}: {wrong}" if wrong else f"PASS LLVM {release}, {name}")


ptx = llvmlite_kernel.compile_for(llvmlite_kernel.SEND, bitcode, "sm_90")
wrong = []
if re.findall(r"^\.visible .*?(\w+)\($", ptx, re.M) != ["send"]:
    wrong.append("the PTX shows other names than the kernel's")
if ".extern .func" in ptx:
    wrong.append("a function is undefined")
if "st.mmio.relaxed.sys.global" not in ptx:
    wrong.append("no work request is written")
judge("a kernel linked with ferrogin_device.bc has all it calls", "; ".join(wrong))

# Alias metadata would let an optimizer drop stores that are read through another type.
text = str(llvm.parse_bitcode(bitcode))
judge("ferrogin_device.bc has no type-based alias metadata", "it has !tbaa" if "!tbaa" in text else "")

try:
    llvm.parse_bitcode(bitcode[: len(bitcode) // 2])
    judge("half of the bitcode is refused", "it was read")
except RuntimeError:
    judge("half of the bitcode is refused", "")
