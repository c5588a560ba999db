#!/usr/bin/env python3
"""Counts kernels' costs: sass.py NVDISASM CUBIN LOG LINKED KERNEL...

LOG is what `ptxas -v` printed when it made CUBIN, and LINKED is CUBIN linked with what it calls. Prints a line for each KERNEL in CUBIN,
tab-separated:

    kernel  instructions  registers  stack  spilled  before  after  shape  with callees  their stack

Instructions are the kernel's own, including what is inlined but not what it calls; NOPs, which are only padding, don't count. "With
callees" adds the instructions of every function that a call can reach, each once; the last column is the deepest stack, which each
function takes from R1. Stack and spilled are in bytes. `before` is the longest chain of loads from global memory that the first atomic
operation, the reservation, depends on, through its operands or a branch; `after` is the number of loads after the second one, the mark.
The shape lists what costs most, in code order: A for an atomic operation, Wn for n stores of 8 bytes to the card's queue, F for a
system-scope fence, D for a doorbell.

Chains follow the order of the code: a register has the depth of its last writer, and everything after a branch or exit has the depth of
its condition.
"""

import re
import subprocess
import sys

SHAPES = [
    ("A", r"ATOMG?\.|RED\."),
    ("W", r"STG\.E\.64\.MMIO\.SYS"),
    ("D", r"STG\.E\.MMIO\.SYS"),
    ("F", r"MEMBAR\.\w+\.SYS|MEMBAR\.SYS"),
]


def instructions(nvdisasm, cubin):
    """name: (opcode, predicate, operands)"""
    found, name = {}, None
    listing = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.([^,\s]+)", line)
        if section:
            name = section[1]
            found[name] = []
        instruction = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)([^;]*)", line)
        if instruction and instruction[2] != "NOP":
            found[name].append((instruction[2], instruction[1], instruction[3]))
    return found


def reachable(code, kernel):
    """The instructions of a linked image's kernel and of all functions that it can reach, and the deepest stack in bytes."""
    callees, frames = {}, {}
    for name, instructions in code.items():
        calls = [operands for opcode, _, operands in instructions if opcode.startswith("CALL")]
        callees[name] = {target[1] for target in (re.search(r"`\(([^)]+)\)", call) for call in calls) if target}
        if len(calls) != sum("`(" in call for call in calls):
            sys.exit(f"{name} has a call whose target is not known")
        steps = [re.match(r"\s*R1,(?: PT, PT,)? R1, -0x([0-9a-f]+)", operands) for _, _, operands in instructions]
        frames[name] = sum(int(step[1], 16) for step in steps if step)
    # CUDA's own function, which the driver provides and which ends the kernel.
    code, callees["__assertfail"], frames["__assertfail"] = code | {"__assertfail": []}, set(), 0
    found, waiting = set(), [kernel]
    while waiting:
        name = waiting.pop()
        if name not in code:
            sys.exit(f"{kernel} calls {name}, which the linked image lacks")
        if name not in found:
            found.add(name)
            waiting += callees[name]

    def deepest(name, callers):
        if name in callers:
            sys.exit(f"{name} calls itself, so that {kernel} has no deepest stack")
        return frames[name] + max([deepest(callee, callers + [name]) for callee in callees[name]], default=0)

    return sum(len(code[name]) for name in found), deepest(kernel, [])


def resources(log):
    """name: (registers, stack, spilled)"""
    pattern = r"entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers"
    with open(log) as text:
        found = re.findall(pattern, text.read(), re.S)
    return {name: (registers, stack, spilled) for name, stack, spilled, registers in found}


REGISTER = r"\b(U?R\d+|U?P\d)\b"


def written(opcode, operands):
    """The registers that an instruction writes, and the text of those that it reads."""
    if re.match(r"ST|RED|MEMBAR|BRA|EXIT|CALL|BSSY|BSYNC|CCTL", opcode):
        return [], operands
    parts = operands.split(",")
    # A comparison writes two predicates, and some additions write a carry after their result.
    outputs = 1
    while outputs < len(parts) and re.fullmatch(r"\s*U?P(\d|T)\s*", parts[outputs - 1 if outputs == 1 else outputs]):
        outputs += 1
    first = re.findall(REGISTER, ",".join(parts[:outputs]))
    result = next((register for register in first if "R" in register), None)
    width = 4 if ".128" in opcode else 2 if re.search(r"\.64|WIDE|CS2R", opcode) else 1
    if result:
        kind, number = re.match(r"(U?R)(\d+)", result).groups()
        first += [f"{kind}{int(number) + i}" for i in range(1, width)]
    return first, ",".join(parts[1:])


def chains(code):
    """The chain of loads before the first atomic, and the number of loads after the second one."""
    depth, control, atomics, before, after = {}, 0, 0, 0, 0
    for opcode, predicate, operands in code:
        outputs, inputs = written(opcode, operands)
        reads = re.findall(REGISTER, inputs) + ([predicate] if predicate else [])
        now = max([control] + [depth.get(register, 0) for register in reads])
        if re.match(r"ATOMG?\.|RED\.", opcode):
            atomics += 1
            if atomics == 1:
                before = now
        elif re.match(r"LDG?\.", opcode):
            now += 1
            after += atomics >= 2
        elif re.match(r"BRA|EXIT", opcode):
            control = now
        for register in outputs:
            depth[register] = max(now, depth.get(register, 0)) if predicate else now
    return before, after


def shape(code):
    parts = []
    for opcode, *_ in code:
        letter = next((letter for letter, pattern in SHAPES if re.match(pattern, opcode)), None)
        if letter == "W" and parts and parts[-1][0] == "W":
            parts[-1] = f"W{int(parts[-1][1:]) + 1}"
        elif letter:
            parts.append("W1" if letter == "W" else letter)
    return " ".join(parts)


def main():
    if len(sys.argv) < 6:
        sys.exit(__doc__)
    nvdisasm, cubin, log, linked, *kernels = sys.argv[1:]
    code, usage, image = instructions(nvdisasm, cubin), resources(log), instructions(nvdisasm, linked)
    for kernel in kernels:
        own = code[kernel]
        print(kernel, len(own), *usage[kernel], *chains(own), shape(own), *reachable(image, kernel), sep="\t")


if __name__ == "__main__":
    main()
