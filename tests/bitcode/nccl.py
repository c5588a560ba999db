"""Shows which fields of a work request the optimizer drops from NCCL's bitcode: nccl.py BITCODE

NCCL's EFA backend fills a request field by field and copies it as 64-bit words. Its bitcode has type-based alias metadata, by which such a
read never sees a 16-bit store, so the optimizer drops the stores to the 16-bit fields. Docs: docs/found-elsewhere.md.
"""

import re
import sys
from pathlib import Path

import llvmlite.binding as llvm

release = ".".join(map(str, llvm.llvm_version_info))
BARRIER = "ncclGinBarrierSessionSync"
REQUEST = "%struct.efa_io_tx_wqe_128"
# Their offsets in a work request. EFA's header efa_io_defs.h has the format.
FIELDS = {"request id": 0, "destination queue pair": 4, "length": 6, "address handle": 12}


def optimize(module):
    target = llvm.Target.from_triple("nvptx64-nvidia-cuda")
    machine = target.create_target_machine(cpu="sm_90", features="+ptx87", opt=2)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return str(module)


def barrier_of(bitcode):
    """Only the barrier and what it calls, as text."""
    module = llvm.parse_bitcode(bitcode)
    for value in [*module.functions, *module.global_variables]:
        if not value.is_declaration and value.name != BARRIER:
            value.linkage = "internal"
    machine = llvm.Target.from_triple("nvptx64-nvidia-cuda").create_target_machine()
    unused = llvm.create_new_module_pass_manager()
    unused.add_global_dead_code_eliminate_pass()
    unused.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return str(module)


def stored(text):
    """The offsets to which each request on the stack is stored."""
    found = []
    for function in re.split(r"\n(?=define )", text):
        for request in re.findall(rf"(%\S+) = alloca {re.escape(REQUEST)}", function):
            at = {request: 0}
            for name, offset in re.findall(rf"(%\S+) = getelementptr inbounds nuw i8, ptr {request}, i64 (\d+)\n", function):
                at[name] = int(offset)
            found.append({at[name] for name in re.findall(r" store \S+ [^,]+, ptr (%[\w.]+)", function) if name in at})
    return found


def missing(requests):
    return [{name for name, offset in FIELDS.items() if offset not in stores} for stores in requests]


def judge(name, right, seen):
    print(f"{'PASS' if right else 'FAIL'} LLVM {release}, {name}" + ("" if right else f": {seen}"))


llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
text = barrier_of(Path(sys.argv[1]).read_bytes())
before = missing(stored(text))
judge("NCCL's bitcode stores every field", len(before) > 0 and not any(before), before)
untouched = missing(stored(optimize(llvm.parse_assembly(text))))
judge("-O2 drops fields from NCCL's bitcode", len(untouched) > 0 and all(drop == set(FIELDS) for drop in untouched), untouched)
without = re.sub(r", !tbaa(?:\.struct)? !\d+", "", text)
kept = missing(stored(optimize(llvm.parse_assembly(without))))
judge("-O2 keeps every field without !tbaa", without != text and len(kept) > 0 and not any(kept), kept)
