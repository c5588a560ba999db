#!/usr/bin/env python3
"""Counts what kernels cost: sass.py NVDISASM CUBIN LOG KERNEL...

LOG is what `ptxas -v` said when it made CUBIN. One line for each KERNEL of CUBIN, tab-separated:

    kernel  instructions  registers  stack  spilled  shape

Instructions are the kernel's own, whatever is inlined included and whatever it calls not; NOPs, which only pad, are left
out. Stack and spilled are in bytes. The shape has, in the order of the code, what costs most: A for an atomic operation,
Wn for n stores of 8 bytes to the card's queue, F for a system-scope fence, D for a doorbell.
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
    """name: opcodes"""
    found, name = {}, None
    listing = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.([^,\s]+)", line)
        if section:
            name = section[1]
            found[name] = []
        instruction = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
        if instruction and instruction[1] != "NOP":
            found[name].append(instruction[1])
    return found


def resources(log):
    """name: (registers, stack, spilled)"""
    pattern = r"entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers"
    with open(log) as text:
        found = re.findall(pattern, text.read(), re.S)
    return {name: (registers, stack, spilled) for name, stack, spilled, registers in found}


def shape(opcodes):
    parts = []
    for opcode in opcodes:
        letter = next((letter for letter, pattern in SHAPES if re.match(pattern, opcode)), None)
        if letter == "W" and parts and parts[-1][0] == "W":
            parts[-1] = f"W{int(parts[-1][1:]) + 1}"
        elif letter:
            parts.append("W1" if letter == "W" else letter)
    return " ".join(parts)


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    nvdisasm, cubin, log, *kernels = sys.argv[1:]
    code, usage = instructions(nvdisasm, cubin), resources(log)
    for kernel in kernels:
        print(kernel, len(code[kernel]), *usage[kernel], shape(code[kernel]), sep="\t")


if __name__ == "__main__":
    main()
