#!/usr/bin/env python3
"""Removes each barrier, fence, wait and flush in turn: mutate.py DIST [SEEDS] from the repaired kernels of this directory,
mutate.py DIST ll|ht|deepep|hybrid [EVERY] from those of nccl_ep and DeepEP, or from every EVERYth place of them.

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


# nccl_ep's and DeepEP's kernels: what compiles them (examples/ep), with which options, and the files in which something is removed.
EP = {
    "ll": ("ll", ["-DRANKS=2"], ["nccl_ep/device/ll_ep.cuh"]),
    "ht": ("ht", ["-DRANKS=2"], ["nccl_ep/device/ht_ep.cuh", "nccl_ep/device/scan_kernel.cuh"]),
    "deepep": ("deepep", ["-std=gnu++20", "-DTOPK=6"], ["deep_ep/common/comm.cuh", "deep_ep/impls/*.cuh"]),
    "hybrid": ("deepep", ["-std=gnu++20", "-DTOPK=6", "-DNODES=2"], ["deep_ep/impls/hybrid_*.cuh"]),
}
# What takes the place of a call with its arguments.
EP_CALLS = [
    (r"__sync(?:threads|warp)|(?:\w+::this_grid\(\)|\bgrid)\.sync|arrive_and_wait|syncSmGroup|\bbar\.sync", "(void)0"),
    (r'asm volatile(?=\("bar\.sync)', "(void)0"),
    (r"(?:\w+::)*(?:tma_store_fence|fence_(?:proxy|barrier|view|acq)\w*|memory_fence|__threadfence\w*)", "(void)0"),
    (r"(?:\w+::)*(?:tma_store_wait(?:<[^<>]*>)?|cp_async_bulk_wait_group(?:_read)?|timeout_while<\w+>)", "(void)0"),
    (r"\.(?:waitSignal|flush(?:<\w+>)?)", ""),
    (r"ptx::mbarrier_wait_and_flip_phase", "phase ^= 1"),
    (r"\bmbarrier_wait<true>", "tmaPhase ^= 1 << stageIdx"),
    (r"(?<!:)\bmbarrier_wait", "(void)0"),
    (r"while(?= \((?:!cuda::ptx::mbarrier_try|(?:nccl_ep::)?ld_(?:acquire|relaxed)|\*streaming_counter|(?:curValue|flag_data|v) [<!]))", "while (false)"),
]
# What takes the place of a name.
EP_NAMES = [
    (r"\bld_acquire(?:_sys)?_global\b", "ld_volatile_global"),
    (r"ptx::ld_acquire_sys\b", "ptx::ld_volatile"),
    (r"\bst_release_sys", "st_relaxed_sys"),
    (r"(?:nccl_ep::)?\batomic_add_(?:release|acqrel)_global\(", "atomicAdd((int*)"),
    (r"(?:nccl_ep::)?\bred_add_release_sys_global\b", "atomicAdd_system"),
]


def closing(text, at):
    """The place after the parenthesis that closes the one at `at`."""
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if depth == 0:
            return end + 1
    return len(text)


def ep_mutants(text):
    """(line, what is removed, the text without it, the text with a trap in its place)"""
    found = []
    for pattern, place in EP_CALLS:
        for match in re.finditer(rf"(?:{pattern})(?= ?\()", text):
            end = closing(text, text.index("(", match.end()))
            if place == "while (false)":
                found.append((match.start(), end, place, "while ((__builtin_trap(), false))"))
            elif not text[end:].lstrip().startswith("{"):  # a definition
                found.append((match.start(), end, place, ".flush((__builtin_trap(), ncclCoopThread()))" if place == "" else "__builtin_trap()"))
    for pattern, place in EP_NAMES:
        for match in re.finditer(pattern, text):
            end = closing(text, text.index("(", match.end() - 1))
            found.append((match.start(), match.end(), place, f"(__builtin_trap(), {text[match.start() : end]})"))
    for begin, end, place, trap in sorted(found):
        if "//" not in text[text.rfind("\n", 0, begin) : begin]:
            what, rest = " ".join(text[begin:end].split()), end if trap.find(text[begin:end]) < 0 else closing(text, text.index("(", end - 1))
            yield text.count("\n", 0, begin) + 1, what, text[:begin] + place + text[end:], text[:begin] + trap + text[rest:]


def code(ptx):
    """The PTX without lines."""
    return [line for line in ptx.read_text().split("\t.section\t.debug")[0].splitlines() if not re.match(r"\s*(\.loc|//|\$L__tmp)", line)]


def ep(dist, kind, every):
    """The same for kernels of nccl_ep or DeepEP, without what these runs don't reach."""
    driver, options, files = EP[kind]
    script, out = ROOT / "tests/ep", ROOT / "target/check/mutants" / kind
    package = "deep_ep" if driver == "deepep" else "nccl_ep"
    fetched = subprocess.run([script / "fetch.sh", ROOT / ".cache", package], check=True, capture_output=True, text=True).stdout.strip()
    headers, program = out / "headers", out / f"ep-{driver}"
    subprocess.run([script / "patch.py", fetched, headers], check=True)
    build = [script / "compile.sh", ROOT / f"examples/ep/{driver}.cu", program, headers, "-gline-tables-only", *options]
    node = ["sh", "-c", 'FERROGIN_NODE=$FERROGIN_RANK exec "$0" "$@"', program, f"kernels={program}.ptx", f"device={dist}/cuda/ferrogin_device.ptx", "rounds=2"]
    run = [dist / "ferrogin", "run", "-n", "2", "--", *node]
    check = [dist / "ferrogin", "check", "--json", "--lenient", "--exceptions", script / "exceptions.txt", "--", *run]
    patience = {"SOFTGPU_WATCHDOG": "60"}
    subprocess.run(build, env=os.environ | {"DIST": str(dist)}, check=True)
    if (verdict := judge(check, environment(1, "emulated", **patience))) != "missed":
        sys.exit(f"{kind} as it is: {verdict}")
    def compile_and_compare():
        """Whether it compiles to other code."""
        failed = subprocess.run(build, env=os.environ | {"DIST": str(dist), "KERNELS_ONLY": "1"}, capture_output=True).returncode
        return None if failed else code(program.with_suffix(".ptx")) != before

    def fails(seed):
        on_gpu = {"FERROGIN_PROVIDER": "softefa", "FERROGIN_DEVICE": "cuda", "SOFTGPU_MEMORY": "weak"}
        return subprocess.run([dist / "ferrogin", "gpu", "--", *run], env=environment(seed, "emulated", **on_gpu, **patience), capture_output=True).returncode

    before, score, place = code(program.with_suffix(".ptx")), {"reported": 0, "visible": 0, "missed": 0}, 0
    for file in sorted(path for pattern in files for path in headers.glob(pattern)):
        text = file.read_text()
        for line, what, mutant, trap in ep_mutants(text):
            file.write_text(mutant)
            if not (differs := compile_and_compare()):
                if differs is None:
                    print(f"does not compile: {file.name}:{line} {what}", flush=True)
                continue
            place += 1
            if place % every:
                continue
            verdict = judge(check, environment(1, "emulated", **patience))
            if verdict == "missed" and (fails(1) or fails(2)):
                verdict = "visible"
            if verdict == "missed":
                file.write_text(trap)
                if compile_and_compare() is None or not fails(1):
                    print(f"not run: {file.name}:{line} {what}", flush=True)
                    continue
            score[verdict] += 1
            print(f"{verdict:8} {file.name}:{line} {what}", flush=True)
        file.write_text(text)
    total(score)


def main():
    dist, more = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    if more and more[0] in EP:
        ep(dist, more[0], int(more[1]) if more[1:] else 1)
        return
    seeds = int(more[0]) if more else 1
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
