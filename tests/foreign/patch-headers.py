#!/usr/bin/env python3
"""Copies NCCL's headers and replaces the PTX on the GIN path with calls to shim/cuda_shim.h.

usage: patch-headers.py FROM TO

FROM and TO are include directories. Everything else stays as NCCL ships it. Fails if a file that the test includes
still has an asm statement, or if a replacement finds nothing to replace: then NCCL has changed, and the list below
must be updated.
"""

import pathlib
import re
import shutil
import sys

SPACE = r"\s*"


def statement(instruction, *operands):
    """A pattern for one asm statement: the instruction text, then the operand lists, whatever the line breaks."""
    parts = [r"asm(?:\s+volatile)?\s*\(\s*\"" + re.escape(instruction) + r"\""] + list(operands) + [r"\)\s*;"]
    return re.compile(SPACE.join(parts), re.S)


OUTPUT = r":\s*\"=r\"\s*\((?P<out>\w+)\)"
STORE = r":\s*:\s*\"[lr]\"\s*\((?P<addr>.+?)\)\s*,\s*\"[lr]\"\s*\((?P<value>[^()]*(?:\([^()]*\)[^()]*)*)\)\s*:\s*\"memory\""

# file: [(pattern, replacement, how often)]; None: at least once
PATCHES = {
    "nccl_device/gin/efa_gda/gin_efa_gda.h": [
        (statement("st.mmio.relaxed.sys.global.b32 [%0], %1;", STORE), r"shim::mmio_store_u32(\g<addr>, \g<value>);", 1),
        (statement("st.mmio.relaxed.sys.global.b64 [%0], %1;", STORE), r"shim::mmio_store_u64(\g<addr>, \g<value>);", 1),
    ],
    "nccl_device/utility.h": [
        (statement("mov.u32 %0, %%laneid;", OUTPUT), r"\g<out> = 0;", 1),
        (statement("mov.u32 %0, %%lanemask_lt;", OUTPUT), r"\g<out> = 0;", 1),
    ],
    "nccl_device/coop.h": [
        (statement("barrier.sync.aligned %0, %1;", STORE), r"abort();", 1),
    ],
    "nccl_device/impl/gin__funcs.h": [
        (statement("red.relaxed.cta.add.u64 [%0],%1;", STORE), r"shim::red_add_u64(\g<addr>, \g<value>);", None),
    ],
}

# What the test includes besides the files above; none of it may contain asm.
CLEAN = [
    "nccl.h",
    "nccl_device/gin.h",
    "nccl_device/gin_barrier.h",
    "nccl_device/gin/gin_device_common.h",
    "nccl_device/impl/core__funcs.h",
    "nccl_device/impl/comm__types.h",
    "nccl_device/impl/gin_barrier__funcs.h",
]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = (pathlib.Path(a) for a in sys.argv[1:])
    if not (source / "nccl.h").is_file():
        sys.exit(f"{source} has no nccl.h: not an include directory of NCCL")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copy(source / "nccl.h", target)
    shutil.copytree(source / "nccl_device", target / "nccl_device")

    for name, patches in PATCHES.items():
        path = target / name
        text = path.read_text()
        for pattern, replacement, times in patches:
            text, found = pattern.subn(replacement, text)
            if found == 0 or times not in (None, found):
                sys.exit(f"{source / name}: {found} places like {pattern.pattern[:60]!r}, expected {times or 'some'}")
        path.write_text(text)

    data_path = sorted((target / "nccl_device/transport/net_efa_gda").rglob("*.*h"))
    for path in [target / name for name in [*PATCHES, *CLEAN]] + data_path:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
        if re.search(r"\basm\b", text):
            sys.exit(f"{path}: an asm statement is left")


if __name__ == "__main__":
    main()
