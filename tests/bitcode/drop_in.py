"""Compares a libnccl_device.bc that ferrogin.nccl_bitcode made with NCCL's own: drop_in.py NCCL'S MADE FUNCTIONS"""

import re
import sys
from pathlib import Path

import llvmlite.binding as llvm

release = ".".join(map(str, llvm.llvm_version_info))
before, after = (str(llvm.parse_bitcode(Path(name).read_bytes())) for name in sys.argv[1:3])
# Types, names and assertions of NCCL's EFA backend, and lambdas of NCCL's barriers, whose names have the number of all
# four backends.
EFA = re.compile(r"efa_io_tx_wqe|EfaCuda|efa_gda|EFA GDA")
LAMBDA = re.compile(r"syncInternal\w+ncclGin_BackendMaskILj60E")


def judge(name, wrong):
    print(f"FAIL LLVM {release}, {name}: {wrong}" if wrong else f"PASS LLVM {release}, {name}")


def functions(text, visible):
    found = re.findall(r"^define ([^@]*)@(\w+)\(", text, re.M)
    return {name for linkage, name in found if ("internal" not in linkage) == visible}


names = {name for name in functions(before, True) if name.startswith("nccl")}
made = functions(after, True)
judge("the drop-in has all functions of NCCL's bitcode, and shows no others", " ".join(sorted(names ^ {name for name in made if "nccl" in name[:4]})))
replaced = {name for name in names if re.match(r"ncclGin|ncclBarrierSession", name)}
judge(f"the drop-in replaces {sys.argv[3]} functions", "" if len(replaced) == int(sys.argv[3]) else f"{len(replaced)}")
judge("NCCL's bitcode has its EFA backend", "" if EFA.search(before) and LAMBDA.search(before) else "the test looks for the wrong names")
judge("no code of NCCL's EFA backend is left", " ".join(sorted(set(EFA.findall(after)))))
judge("the barriers' lambdas are ferrogin's", " ".join(sorted(set(LAMBDA.findall(after)))))
undefined = set(re.findall(r"^declare [^@]*@(\w[\w.]*)\(", after, re.M))
judge("only __assertfail is undefined", " ".join(sorted(name for name in undefined if name != "__assertfail" and not name.startswith("llvm."))))
