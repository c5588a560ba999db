"""What `python -m ferrogin.nccl_bitcode` refuses, each with one line: refusals.py DIRECTORY NCCL-2.31.2 NCCL-2.32.3"""

import os
import subprocess
import sys
from pathlib import Path

work, older, newer = (Path(name).resolve() for name in sys.argv[1:])


def nccl(name, header=None, include=newer, bitcode=newer):
    """A directory as NCCL's package has it, made of parts of others."""
    made = work / name
    (made / "lib").mkdir(parents=True)
    if header is None:
        (made / "include").symlink_to(include / "include")
    else:
        (made / "include").mkdir()
        (made / "include/nccl.h").write_text(header)
    data = bitcode if isinstance(bitcode, bytes) else (bitcode / "lib/libnccl_device.bc").read_bytes()
    (made / "lib/libnccl_device.bc").write_bytes(data)
    return made


def package(name, text):
    """A module that hides this environment's llvmlite."""
    (work / name / "llvmlite").mkdir(parents=True)
    (work / name / "llvmlite/__init__.py").write_text(text)
    (work / name / "llvmlite/binding.py").write_text(text)
    return {"PYTHONPATH": str(work / name)}


def judge(name, expected, arguments, **settings):
    done = subprocess.run(
        [sys.executable, "-m", "ferrogin.nccl_bitcode", str(work / "out"), *arguments], capture_output=True, text=True, env={**os.environ, **settings}
    )
    lines = done.stderr.splitlines()
    right = done.returncode == 1 and len(lines) == 1 and lines[0].startswith("ferrogin: ") and expected in lines[0]
    right = right and not (work / "out").exists()
    print(f"{'PASS' if right else 'FAIL'} refused: {name}" + ("" if right else f": status {done.returncode}: {done.stderr!r}"))


header = (newer / "include/nccl.h").read_text()
half = (newer / "lib/libnccl_device.bc").read_bytes()[:100_000]
other = header.replace("#define NCCL_PATCH 3", "#define NCCL_PATCH 99")
judge("no NCCL", "this Python has no NCCL: pip install nvidia-nccl-cu13", [])
judge("a directory without NCCL", "No such file or directory: --nccl names a directory", ["--nccl", str(work)])
judge("another release", "is of NCCL 2.32.99, and this ferrogin knows 2.31.2 and 2.32.3", ["--nccl", str(nccl("other", header=other))])
judge("the bitcode of another release", "lacks ncclBarrierSessionDestroy, unlike NCCL 2.32.3", ["--nccl", str(nccl("mixed", bitcode=older))])
judge("half of the bitcode", "can't read it: install the package of NCCL 2.32.3 again", ["--nccl", str(nccl("half", bitcode=half))])
judge("headers that don't compile", "refuses NCCL's headers: ", ["--nccl", str(nccl("empty", header=header))])
judge("no clang", "no clang 22 or newer (none found): apt-get install clang-22", ["--nccl", str(newer)], PATH=str(work))
judge("another program as clang", "is no clang", ["--nccl", str(newer)], CLANG=sys.executable)
judge("LLVM 19", "LLVM 19, which can't read", ["--nccl", str(newer)], **package("old", "llvm_version_info = (19, 1, 0)"))
judge("no llvmlite", "llvmlite isn't installed: pip install", ["--nccl", str(newer)], **package("none", "raise ImportError"))
