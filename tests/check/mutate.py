#!/usr/bin/env python3
"""Removes each barrier, fence, wait and flush from the repaired kernels in turn: mutate.py DIST [SEEDS], or from nccl_ep's LL: mutate.py DIST ep

Prints for each removal whether `ferrogin check` reports it, and if it doesn't, whether the kernel finds a wrong value or fails, with any of the
seeds; then the score. A flush that ends a kernel isn't counted, because closing the context does the same. Run tests/check/run.sh first: it
compiles the driver.

  CHECK_ONLY=TEXT   only kernels whose files or names contain TEXT
"""

import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
# What is removed, and what takes its place.
REMOVALS = [
    ("barrier", r"__sync(?:threads|warp)\(\)", "(void)0"),
    ("barrier", r'asm volatile\("bar\.sync.*?: "memory"\)', "(void)0"),
    ("fence", r'FENCE\("\w+"\s*\)', "(void)0"),
    ("fence", r'PTX\("fence\.[^)]*\)', "(void)0"),
    ("release", r'(?<=STORE\(")release|(?<=ADD\(")release', "relaxed"),
    ("acquire", r'(?<=LOAD\(")acquire', "relaxed"),
    ("wait", r"(?:gin|other)\.wait(?:Signal|Counter)\((?:[^()]|\([^()]*\))*\)", "FGIN_OK"),
    ("wait", r'PTX\("cp\.async\.bulk\.wait_group[^)]*\)', "(void)0"),
    ("flush", r"(?:gin|other)\.flush\(\)", "(void)0"),
]
# BUG and FIX are resolved before, so that a line is what the repaired kernel has.
PARTS = r"{}\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"


def repaired(text):
    text = re.sub(PARTS.format("BUG"), "", text)
    return re.sub(PARTS.format("FIX"), r"\1", text)


def kernels():
    """(file, name, text of the kernel and of the one after it)"""
    for path in sorted(HERE.glob("*.cu")):
        found = {}
        for name, body in re.findall(r"^KERNEL\((\w+)\)( \{\n.*?^\})", repaired(path.read_text()), re.M | re.S):
            found.setdefault(name.removesuffix("_then"), []).append((name.endswith("_then"), body))
        for name, parts in found.items():
            if os.environ.get("CHECK_ONLY", "") in f"{path.name} {name}":
                yield path.name, name, parts


def mutants():
    for file, name, parts in kernels():
        for at, (_, body) in enumerate(parts):
            for kind, pattern, place in REMOVALS:
                for match in re.finditer(pattern, body):
                    if kind == "flush" and re.fullmatch(r"[;\s}]*|;\s*other\.flush\(\);\s*\}", body[match.end() :]):
                        continue
                    changed = [(then, text if n != at else text[: match.start()] + place + text[match.end() :]) for n, (then, text) in enumerate(parts)]
                    yield file, name, kind, match[0], changed


def environment(seed, signals, **more):
    env = os.environ | {"SOFTGPU_SEED": str(1000 * seed), "SOFTEFA_FAULTS": f"seed={seed},reorder=64,delay_us=0..200", "FERROGIN_SIGNALS": signals}
    return env | {"SOFTGPU_WATCHDOG": "20", "FERROGIN_WAIT_TIMEOUT": "5"} | more


def judge(command, env):
    """Runs a command under the check: `reported`, `visible` or `missed`."""
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    reports = [line for line in ended.stdout.splitlines() if line.startswith("{") and '"note":false' in line]
    if reports:
        return "reported"
    return "visible" if ended.returncode or re.search(r"[ :] [1-9]\d* values are wrong", ended.stderr) else "missed"


def total(score):
    print(f"mutants: {sum(score.values())}, {', '.join(f'{count} {verdict}' for verdict, count in score.items())}")


LL_REMOVALS = [
    r"__sync(?:threads|warp)\(\);",
    r"(?<=\n)[^\n;]*cg::this_grid\(\)\.sync\(\);",
    r"fence_barrier_init\(\);",
    r"tma_store_(?:fence\(\)|wait<[^>]*>\(\));",
    r"mbarrier_wait<true>\([^;]*;",
    r"while \(ld_acquire[^;]*;",
    r"(?<=[ !*])ld_acquire(?=_sys_global\()",
    r"atomic_add_release(?=_global\()",
]


def ep(dist):
    """The same for nccl_ep's LL kernels, without their functions that these runs don't call."""
    out, script = ROOT / "target/ep", ROOT / "tests/ep"
    package = subprocess.run([script / "fetch.sh", ROOT / ".cache"], check=True, capture_output=True, text=True).stdout.strip()
    headers, program = out / "headers-mutant", out / "mutant"
    subprocess.run([script / "patch.py", package, headers], check=True)
    file = headers / "nccl_ep/device/ll_ep.cuh"
    text = file.read_text()
    end = text.index("\n", [match.end() for match in re.finditer("tma_store_fence", text)][-1]) + 600
    score = {"reported": 0, "visible": 0, "missed": 0}
    for pattern in LL_REMOVALS:
        for match in re.finditer(pattern, text[:end]):
            weaker = "ld_volatile" if match[0] == "ld_acquire" else ";"
            line = text[: match.start()].count("\n") + 1
            file.write_text(text[: match.start()] + weaker + text[match.end() :])
            build = [script / "compile.sh", ROOT / "examples/ep/ll.cu", program, headers, "-gline-tables-only"]
            if subprocess.run(build, env=os.environ | {"DIST": str(dist)}, capture_output=True).returncode:
                print(f"does not compile: ll_ep.cuh:{line} {match[0].strip()}", flush=True)
                continue
            node = ["sh", "-c", 'FERROGIN_NODE=$FERROGIN_RANK exec "$0" "$@"']
            run = [dist / "ferrogin", "run", "-n", "2", "--", *node, program, f"kernels={program}.ptx", f"device={dist}/cuda/ferrogin_device.ptx", "rounds=2"]
            verdict = judge([dist / "ferrogin", "check", "--json", "--lenient", "--", *run], environment(1, "emulated"))
            if verdict == "missed":
                for seed in (1, 2):
                    on_gpu = {"FERROGIN_PROVIDER": "softefa", "FERROGIN_DEVICE": "cuda", "SOFTGPU_MEMORY": "weak"}
                    weak = subprocess.run([dist / "ferrogin", "gpu", "--", *run], env=environment(seed, "emulated", **on_gpu), capture_output=True)
                    verdict = "visible" if weak.returncode else verdict
            score[verdict] += 1
            print(f"{verdict:8} ll_ep.cuh:{line} {match[0].strip()}", flush=True)
    file.write_text(text)
    total(score)


def main():
    if sys.argv[2:] == ["ep"]:
        ep(pathlib.Path(sys.argv[1]).resolve())
        return
    dist, seeds = pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    out = ROOT / "target/check"
    source, all_of = '#define REPAIRED\n#include "check.h"\n', []
    for number, (file, name, kind, what, parts) in enumerate(mutants()):
        mutant = f"{name}_m{number}"
        source += "".join(f"KERNEL({mutant}{'_then' if then else ''}){body}\n" for then, body in parts)
        all_of.append((mutant, file, name, kind, what))
    (out / "mutants.cu").write_text(source)
    clang = "clang++-22 -x cuda -std=c++17 --cuda-device-only --cuda-gpu-arch=sm_90 --cuda-feature=+ptx86 -nocudainc -nocudalib -O2 -w -S"
    subprocess.run([*clang.split(), f"-I{dist}/include", f"-I{HERE}", "-include", "ferrogin/clang_cuda.h", out / "mutants.cu", "-o", out / "mutants.ptx"], check=True)
    score = {"reported": 0, "visible": 0, "missed": 0}
    for mutant, file, name, kind, what in all_of:
        verdict = "missed"
        for seed in range(1, seeds + 1):
            run = [dist / "ferrogin", "check", "--json", "--", dist / "ferrogin", "run", "-n", "2", "--"]
            run += [out / "driver", out / "mutants.ptx", dist / "cuda/ferrogin_device.ptx", mutant]
            found = judge(run, environment(seed, "emulated" if name.startswith("strong_") else "card"))
            verdict = found if found != "missed" else verdict
            if verdict == "reported":
                break
        score[verdict] += 1
        print(f"{verdict:8} {file} {name}: {kind} {what}", flush=True)
    total(score)


if __name__ == "__main__":
    main()
