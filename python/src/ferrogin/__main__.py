"""`python -m ferrogin NAME` prints the path of a part of the package; the command `ferrogin` runs the tool."""

from __future__ import annotations

import os
import sys

from ferrogin import paths

_PARTS = {
    "include": paths.include,
    "lib": paths.lib,
    "plugin": paths.plugin,
    "ptx": paths.ptx,
    "bitcode": paths.bitcode,
    "objects": paths.cuda_object,
    "tool": paths.tool,
}


def main() -> int:
    """Prints one path, or all."""
    names = sys.argv[1:]
    if any(name not in _PARTS for name in names):
        print(f"usage: python -m ferrogin [{'|'.join(_PARTS)}]...", file=sys.stderr)
        return 2
    for name in names or _PARTS:
        try:
            path = str(_PARTS[name]())
        except FileNotFoundError as error:
            if names:
                print(f"ferrogin: {error}", file=sys.stderr)
                return 1
            path = "not in this wheel"
        print(path if names else f"{name:<8} {path}")
    return 0


def run_tool() -> None:
    """Becomes the ferrogin tool, with the same arguments."""
    tool = str(paths.tool())
    os.execv(tool, [tool, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
