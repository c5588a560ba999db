#!/usr/bin/env python3
"""Compares reports with the comments in the kernels' sources: expect.py REPORTS wrong|repaired NAME...

REPORTS has the output of `ferrogin check --json`. Wrong kernels must have the report that their `CHECK kind` comments describe, of that kind and
with those lines, and none that names another line. Repaired ones, and wrong ones without comments, must have none. Prints a line per kernel that differs.
"""

import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent


def expectations():
    """The kind and the marked lines of each kernel, as file:line."""
    kernels = {}
    for path in sorted([*HERE.glob("*.cu"), *HERE.glob("*.rs")]):
        name = None
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if kernel := re.match(r'(?:KERNEL\(|.*"ptx-kernel" fn )(\w+)', line):
                name = kernel[1].removesuffix("_then")
                kernels.setdefault(name, (None, set()))
            if mark := re.search(r"// CHECK (\w+)", line):
                kernels[name] = (mark[1], kernels[name][1] | {f"{path.name}:{number}"})
    return kernels


def kernel_of(report):
    names = [access["kernel"].removesuffix("_then") for access in report["accesses"] if access["kernel"]]
    return names[0] if names else "?"


def places(report):
    """The lines of each access, without directories."""
    return [{line.rsplit("/", 1)[-1] for line in access["lines"]} for access in report["accesses"]]


def is_at(report, marked):
    """Whether the report names only marked lines."""
    return all(side & marked for side in places(report) if side)


def covers(report, kind, marked):
    return report["kind"] == kind and all(any(line in side for side in places(report)) for line in marked)


def main():
    path, mode, *names = sys.argv[1:]
    reports = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.startswith("{")]
    kernels, bad = expectations(), 0
    for name in names:
        kind, marked = kernels[name] if mode == "wrong" else (None, set())
        found = [report for report in reports if kernel_of(report) == name]
        if kind is None:
            problem = "is reported" if found else None
        elif not found:
            problem = "is not reported"
        else:
            right = all(is_at(report, marked) for report in found) and any(covers(report, kind, marked) for report in found)
            problem = None if right else "has another report"
        if problem:
            bad += 1
            lines = [f"{report['kind']} {' / '.join(' '.join(sorted(side)) or '?' for side in places(report))}" for report in found]
            print(f"{name} ({kind or 'nothing'} {' '.join(sorted(marked))}) {problem}: {'; '.join(lines)}")
    for report in reports:
        if kernel_of(report) not in names:
            bad += 1
            print(f"a report names no kernel of this run: {report}")
    sys.exit(bad != 0)


if __name__ == "__main__":
    main()
