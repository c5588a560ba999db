#!/usr/bin/env python3
"""Runs tests on mutants of the files that .cargo/mutants.toml names: run.py DIST [ROUND].

cargo-mutants lists the mutants. All of an area are built at once: each function has one body for each of its mutants, and FERROGIN_MUTANT
selects one at run time. A mutant that some test fails on, or on which the tests do not end, passes. A mutant that all tests pass on fails,
or is skipped if accepted.txt has it: CONTRIBUTING.md, "Mutation tests". Mutants of constants, of const functions and of functions that return
`impl Trait` are left out, and those that do not compile.

  MUTANTS=N        mutants of a round [100]
  MUTANTS_AREA=A   only this area
"""

import collections
import json
import os
import re
import signal
import subprocess
import sys
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
TARGET = os.path.join(ROOT, "target/mutants")
TREE = os.path.join(TARGET, "tree")
VERSION = "27.1.0"
CARGO = os.environ.get("CARGO", "cargo")

# An area: its package and the package's directory; the packages whose tests run on the mutants that its own tests missed; slow tests that
# have nothing to do with it.
AREAS = {
    "device": ("ferrogin-device-kernels", "device-kernels", [], []),
    "queue": ("efa-dp-direct", "efa-dp-direct", ["ferrogin-device-kernels"], ["schedules::"]),
    "plugin": ("ferrogin-host-plugin", "host-plugin", [], ["abi_fuzz::", "leaks::", "scale::"]),
    "card": ("soft-nic", "emulators/soft-nic", ["softefa"], []),
    "mlx5": ("mlx5", "services/mlx5", ["soft-mlx5"], []),
    "channel": ("ferrogin-channel", "services/channel", [], ["idle::"]),
}

# Values that rarely compile, because the type has no default.
NO_VALUE = re.compile(r"Default::default\(\)|Box::leak|Arc::new|iter::|Vec::leak")

SWITCH = """
extern crate std as ferrogin_std;
#[doc(hidden)]
#[allow(missing_docs)]
pub fn ferrogin_mutant() -> u32 {
    static MUTANT: ferrogin_std::sync::OnceLock<u32> = ferrogin_std::sync::OnceLock::new();
    *MUTANT.get_or_init(|| ferrogin_std::env::var("FERROGIN_MUTANT").ok().and_then(|n| n.parse().ok()).unwrap_or(0))
}
"""


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path, text):
    """Writes a file that differs, so that cargo builds only what changed."""
    if not os.path.isfile(path) or read(path) != text:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def copy_tree():
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout
    files = {name for name in listed.split("\0") if os.path.isfile(os.path.join(ROOT, name))}
    for name in files:
        source, target = os.path.join(ROOT, name), os.path.join(TREE, name)
        with open(source, "rb") as file:
            data = file.read()
        if os.path.isfile(target):
            with open(target, "rb") as file:
                if file.read() == data:
                    continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(data)
        os.chmod(target, os.stat(source).st_mode)
    for top, _, names in os.walk(TREE):
        for name in names:
            path = os.path.join(top, name)
            if os.path.relpath(path, TREE) not in files:
                os.remove(path)


def cargo_mutants():
    """The program, which is installed if it is not there. None if that fails."""
    program = os.path.join(TARGET, "tool/bin/cargo-mutants")
    install = [CARGO, "install", "--quiet", "--locked", "--root", os.path.join(TARGET, "tool"), f"cargo-mutants@{VERSION}"]
    if not os.path.isfile(program):
        env = dict(os.environ, CARGO_TARGET_DIR=os.path.join(TARGET, "tool"))
        if subprocess.run(install, env=env).returncode != 0:
            print("SKIP mutants: cargo-mutants is missing:", " ".join(install))
            return None
    return program


def mutants_of(program, package):
    command = [program, "mutants", "--list", "--json", "--package", package]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout
    mutants = json.loads(listed)
    for number, mutant in enumerate(mutants, 1):
        mutant["number"] = number
    return [m for m in mutants if m["function"] and not (m["genre"] == "FnValue" and NO_VALUE.search(m["replacement"]))]


def body_of(text, first, end, function):
    """Where the body of a function begins, with its brace; None if mutants cannot be selected in it at run time."""
    name = re.sub(r"<.*", "", function.split("::")[-1])
    head = re.search(r"(?m)^[^/\n]*\bfn\s+" + re.escape(name) + r"\b", text[first:end])
    if not head or re.search(r"\bconst\s+(unsafe\s+)?fn", head.group(0)):
        return None
    at, depth = first + head.end(), 0
    while at < end and (text[at] != "{" or depth != 0):
        depth += (text[at] in "([") - (text[at] in ")]")
        at += 1
    return None if at == end or "-> impl" in text[first:at] else at


def with_mutants(text, mutants):
    """The text with all mutants, the first and last line of each, and the numbers of those that are in it."""
    starts = [0]
    for line in text.splitlines(True):
        starts.append(starts[-1] + len(line))

    def offset(place):
        return starts[place["line"] - 1] + place["column"] - 1

    functions = collections.defaultdict(list)
    for mutant in mutants:
        span = mutant["function"]["span"]
        functions[offset(span["start"]), offset(span["end"])].append(mutant)
    out, position, lines = "", 0, []
    for (first, end), group in sorted(functions.items()):
        body = body_of(text, first, end, group[0]["function"]["function_name"])
        # A function in another is a part of that one's bodies.
        if body is None or first < position:
            continue
        out += text[position:body] + "{ match crate::ferrogin_mutant() {\n"
        for mutant in group:
            start, stop = offset(mutant["span"]["start"]), offset(mutant["span"]["end"])
            if start >= body and stop <= end:
                line = out.count("\n") + 1
                out += f"{mutant['number']} => {text[body:start]}{mutant['replacement']}{text[stop:end]}\n"
                lines.append((line, out.count("\n"), mutant["number"]))
        out += f"_ => {text[body:end]}\n}} }}"
        position = end
    return out + text[position:], lines


def cargo(env, *arguments):
    """The messages of a run of cargo in the copy, and whether it succeeded."""
    run = subprocess.run([CARGO, *arguments, "--locked", "--profile=mutants", "--message-format=json"], cwd=TREE, env=env,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")], run


def build(env, package, directory, mutants):
    """Writes the sources with all mutants that compile, and returns their numbers. None if the sources do not compile."""
    library, broken = directory + "/src/lib.rs", set()
    while True:
        by_file = collections.defaultdict(list)
        for mutant in mutants:
            by_file[mutant["file"]] += [mutant] if mutant["number"] not in broken else []
        by_file[library] += []
        arms = {}
        for name, group in by_file.items():
            text, arms[name] = with_mutants(read(os.path.join(ROOT, name)), group)
            # Bodies with many mutants are too long to be inlined everywhere.
            text = text.replace("inline(always)", "inline(never)")
            if name == library:
                # Without a line break, so that the lines of the mutants stay.
                text = "#![allow(arithmetic_overflow, unconditional_panic)] " + text + SWITCH
            write(os.path.join(TREE, name), text)
        messages, run = cargo(env, "check", "--lib", "--package", package)
        if run.returncode == 0:
            return {number for lines in arms.values() for _, _, number in lines}
        errors = [m["message"] for m in messages if m["reason"] == "compiler-message" and m["message"]["level"] == "error"]
        spans = [span for error in errors for span in error["spans"]]
        found = {number for span in spans for first, last, number in arms.get(span["file_name"], [])
                 if first <= span["line_start"] <= last}
        if not found:
            print(run.stderr, *(error["rendered"] for error in errors), sep="\n")
            return None
        broken |= found


def programs(env, packages):
    """The test programs of packages and where they run; None if they do not compile."""
    chosen = [word for package in packages for word in ("--package", package)]
    messages, run = cargo(env, "test", "--no-run", "--tests", *chosen)
    if run.returncode != 0:
        print(run.stderr)
        return None
    built = [m for m in messages if m["reason"] == "compiler-artifact" and m["executable"] and m["profile"]["test"]]
    return [(m["executable"], os.path.dirname(m["manifest_path"])) for m in built]


def tests(env, found, without, number, limit):
    """Runs test programs on a mutant, 0 for none, until one fails: "missed", "caught" or "timeout", and the output of that one."""
    end = time.monotonic() + limit
    for program, place in found:
        child = subprocess.Popen([program, "--include-ignored", *("--skip=" + part for part in without)], cwd=place,
                                 env=dict(env, FERROGIN_MUTANT=str(number)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 start_new_session=True, text=True, errors="replace")
        try:
            output, _ = child.communicate(timeout=max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return "timeout", ""
        if child.returncode != 0:
            return "caught", output
    return "missed", ""


def round_of(area, turn, dist):
    package, directory, others, without = AREAS[area]
    program = cargo_mutants()
    if program is None:
        return 0, 0, 1
    copy_tree()
    env = dict(os.environ, CARGO_TARGET_DIR=TARGET, FERROGIN_DIST=os.path.join(TARGET, "dist"), RUST_TEST_THREADS="4")
    env.setdefault("FERROGIN_SCHEDULES", "100")
    for name in ("FERROGIN_SOAK", "FERROGIN_MUTANT"):
        env.pop(name, None)
    # The tests of the plugin load the mutated plugin, beside the software card of DIST.
    os.makedirs(env["FERROGIN_DIST"], exist_ok=True)
    plugin = ("libnccl-gin-ferrogin.so", os.path.join(TARGET, "mutants/deps/libnccl_gin_ferrogin.so"))
    for name, source in [(name, os.path.join(dist, name)) for name in os.listdir(dist)] + [plugin]:
        link = os.path.join(env["FERROGIN_DIST"], name)
        if os.path.islink(link):
            os.remove(link)
        os.symlink(source, link)

    mutants = mutants_of(program, package)
    compiled = build(env, package, directory, mutants)
    own = compiled and programs(env, [package])
    if not own:
        print(f"FAIL mutants {area}: the package with all mutants does not compile")
        return 0, 1, 0
    names = {m["number"]: m["name"] for m in mutants if m["number"] in compiled}
    shards = -(-len(names) // int(os.environ.get("MUTANTS", "100")))
    chosen = sorted(names)[turn % shards::shards]
    print(f"{area}: {len(chosen)} of {len(names)} mutants, shard {turn % shards} of {shards}", flush=True)
    results = {}
    for found, todo in ((lambda: own, chosen), (lambda: programs(env, others) if others else [], None)):
        todo = todo if todo is not None else [n for n in chosen if results[n] == "missed"]
        found = found() if todo else []
        if not found:
            break
        began = time.monotonic()
        result, output = tests(env, found, without, 0, 900)
        if result != "missed":
            print(output, f"FAIL mutants {area}: the tests fail without a mutation ({result})", sep="\n")
            return 0, 1, 0
        limit = 3 * (time.monotonic() - began) + 10
        for number in todo:
            results[number], _ = tests(env, found, without, number, limit)
            print(f"{results[number]}: {names[number]}", flush=True)

    accepted = [line for line in read(os.path.join(ROOT, "tests/mutants/accepted.txt")).splitlines() if line and line[0] != "#"]
    counts = collections.Counter()
    for number, result in results.items():
        known = any(re.search(pattern, names[number]) for pattern in accepted)
        word = "PASS" if result != "missed" else "SKIP" if known else "FAIL"
        counts[word] += 1
        print(f"{word} mutants {area}: {names[number]}" + (": accepted" if word == "SKIP" else ""))
    return counts["PASS"], counts["FAIL"], counts["SKIP"]


def main():
    dist, turn = os.path.realpath(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    areas = [os.environ["MUTANTS_AREA"]] if os.environ.get("MUTANTS_AREA") else list(AREAS)
    passed, failed, skipped = round_of(areas[turn % len(areas)], turn // len(areas), dist)
    print(f"mutants: {passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed != 0)


main()
