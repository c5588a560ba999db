"""`python -m ferrogin NAME` prints the path of a part of the package; the command `ferrogin` runs the tool."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
    """Prints the paths of the named parts, or of all."""
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


def _make_links(directory: Path) -> None:
    """Makes the directory's symbolic links, which a wheel cannot contain: the file `links` lists their paths and targets."""
    for line in (directory / "links").read_text().splitlines():
        path, target = line.split("\t")
        try:
            (directory / path).symlink_to(target)
        except FileExistsError:
            pass
        except OSError as error:
            print(f"ferrogin: {error}: run `ferrogin verbs` once as the user who installed the package", file=sys.stderr)
            return


def run_tool() -> None:
    """Replaces this process with the ferrogin tool, with the same arguments."""
    tool = str(paths.tool())
    if sys.argv[1:2] == ["verbs"]:
        _make_links(paths.lib() / "ferrogin" / "verbs")
    os.execv(tool, [tool, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
