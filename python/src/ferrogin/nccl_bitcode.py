"""Makes NCCL's libnccl_device.bc with ferrogin's GIN functions: `python -m ferrogin.nccl_bitcode DIRECTORY`, then `NCCL_HOME=DIRECTORY`.

Needs clang 22 or newer, and llvmlite 0.45 or newer. The result contains compiled headers of NVIDIA's: make it where it's used.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ferrogin import paths

# The releases whose functions nccl_bitcode.cu defines.
RELEASES = ("2.31.2", "2.32.3")
CLANG = 22
LLVM = 20
_REPLACED = re.compile(r"(ncclGin|ncclBarrierSession)\w+")
_SOURCE = Path(__file__).with_name("nccl_bitcode.cu")


class Failed(Exception):
    """Why there is no bitcode, and what to do."""


def find_nccl() -> Path:
    """The directory of the package nvidia-nccl-cu13 or nvidia-nccl-cu12 in this Python, with include/ and lib/."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        found = None
    for place in (found.submodule_search_locations or []) if found else []:
        return Path(place)
    raise Failed("this Python has no NCCL: pip install nvidia-nccl-cu13==2.32.3, or name a directory with include/ and lib/ by --nccl")


def release_of(nccl: Path) -> str:
    """The release of NCCL's headers."""
    header = nccl / "include" / "nccl.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise Failed(f"{header}: {error.strerror}: --nccl names a directory with NCCL's include/ and lib/") from None
    parts = [re.search(rf"#define NCCL_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    release = ".".join(part[1] for part in parts if part)
    if release not in RELEASES:
        raise Failed(f"{header} is of NCCL {release or 'of no release'}, and this ferrogin knows {' and '.join(RELEASES)}: install one of them")
    return release


def find_clang() -> str:
    """The command of a clang that compiles the headers."""
    asked = os.environ.get("CLANG")
    seen = []
    for command in [asked] if asked else ["clang++-22", "clang++", "clang"]:
        if shutil.which(command) is None:
            continue
        version = subprocess.run([command, "-dumpversion"], capture_output=True, text=True).stdout.strip()
        if version.split(".")[0].isdigit() and int(version.split(".")[0]) >= CLANG:
            return command
        seen.append(f"{command} is {version or 'no clang'}")
    raise Failed(f"no clang {CLANG} or newer ({', '.join(seen) or 'none found'}): apt-get install clang-{CLANG}, or name one by CLANG=")


def _llvm() -> Any:
    try:
        llvm: Any = importlib.import_module("llvmlite.binding")
    except ImportError:
        raise Failed("llvmlite isn't installed: pip install 'llvmlite>=0.45'") from None
    version = llvm.llvm_version_info
    if version[0] < LLVM:
        raise Failed(f"llvmlite has LLVM {version[0]}, which can't read NCCL's bitcode of LLVM {LLVM}: pip install 'llvmlite>=0.45'")
    llvm.initialize_all_targets()
    return llvm


def _for_llvm_20(text: str) -> str:
    """The module without what later releases have added. They are hints, and sizes that the optimizer can do without."""
    for word in (" nocreateundeforpoison", " dead_on_return"):
        text = text.replace(word, "")
    text = text.replace("captures(none)", "nocapture")
    text = re.sub(r" captures\([^)]*\)+", "", text)
    text = re.sub(r", (?:errnomem|target_mem\d): \w+", "", text)
    text = re.sub(r"(?m)^(declare .*@llvm\.lifetime\.\w+\.p0\()ptr", r"\1i64, ptr", text)
    text = re.sub(r"(call .*@llvm\.lifetime\.\w+\.p0\()ptr", r"\1i64 -1, ptr", text)
    return re.sub(r"(?m)^target datalayout = .*$", "", text)


def compile_functions(nccl: Path, clang: str) -> str:
    """The functions of nccl_bitcode.cu as text, compiled with NCCL's headers."""
    include = paths.include()
    command = [clang, "-x", "cuda", "-std=gnu++17", "--cuda-device-only", "--cuda-gpu-arch=sm_90", "--cuda-feature=+ptx87"]
    command += ["-nocudainc", "-nocudalib", "-O2", "-DNDEBUG", "-S", "-emit-llvm", "-o", "-"]
    # Alias metadata would let the optimizer drop stores that are read through another type.
    command += ["-fno-strict-aliasing", "-DNCCL_OS_LINUX=1", "-DNCCL_GIN_EFA_GDA_ENABLE=1", "-DNCCL_GIN_PROXY_ENABLE=1"]
    command += ["-DNCCL_GIN_GDAKI_ENABLE=0", "-DNCCL_GIN_GPI_ENABLE=0", f"-I{include}", "-include", "ferrogin/clang_cuda.h"]
    command += [f"-I{include}/ferrogin/clang", "-isystem", str(nccl / "include"), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines() or ["it says nothing"]
        raise Failed(f"{clang} refuses NCCL's headers: {why[0]}")
    return done.stdout


def _defined(module: Any) -> dict[str, Any]:
    return {function.name: function for function in module.functions if not function.is_declaration}


def make(nccl: Path, clang: str, device_code: Path) -> bytes:
    """The bitcode: NCCL's, with the GIN functions of ferrogin."""
    release = release_of(nccl)
    llvm = _llvm()
    original = nccl / "lib" / "libnccl_device.bc"
    try:
        theirs = llvm.parse_bitcode(original.read_bytes())
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"LLVM {llvm.llvm_version_info[0]} can't read it"
        raise Failed(f"{original}: {why}: install the package of NCCL {release} again") from None
    ours = llvm.parse_assembly(_for_llvm_20(compile_functions(nccl, clang)))
    replaced = {name for name in _defined(theirs) if _REPLACED.fullmatch(name)}
    made = {name for name in _defined(ours) if _REPLACED.fullmatch(name)}
    if replaced != made:
        wrong = sorted(replaced ^ made)[0]
        lacks = "has" if wrong in replaced else "lacks"
        raise Failed(f"{original} {lacks} {wrong}, unlike NCCL {release}: install the package of NCCL {release} again")
    ours.link_in(llvm.parse_bitcode(device_code.read_bytes()))
    # Only the replaced functions are visible, so that no other of NCCL's or of the kernel's, of equal name, is taken
    # for one of ours.
    for value in [*ours.functions, *ours.global_variables]:
        if not value.is_declaration and value.name not in made:
            value.linkage = "internal"
    # A definition that can be discarded gives way to the one that is there, and what only it uses is never linked.
    for name, function in _defined(theirs).items():
        if name in replaced:
            function.linkage = "linkonce_odr"
        elif name.startswith("_Z"):
            function.linkage = "internal"
    ours.link_in(theirs)
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    machine = llvm.Target.from_triple("nvptx64-nvidia-cuda").create_target_machine(cpu="sm_90")
    passes.run(ours, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    ours.verify()
    bitcode: bytes = ours.as_bitcode()
    return bitcode


def main() -> int:
    """Writes DIRECTORY/lib/libnccl_device.bc."""
    parser = argparse.ArgumentParser(prog="python -m ferrogin.nccl_bitcode", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="the later value of NCCL_HOME")
    parser.add_argument("--nccl", type=Path, help="a directory with NCCL's include/ and lib/, in place of this Python's nvidia-nccl-cu13")
    given = parser.parse_args()
    out = given.directory / "lib" / "libnccl_device.bc"
    try:
        nccl = given.nccl or find_nccl()
        if out.exists() and out.samefile(nccl / "lib" / "libnccl_device.bc"):
            raise Failed(f"{out} is NCCL's own file: name another directory")
        bitcode = make(nccl, find_clang(), paths.bitcode())
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(bitcode)
    except (Failed, OSError) as error:
        print(f"ferrogin: {error}", file=sys.stderr)
        return 1
    print(f"NCCL_HOME={given.directory.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
