#!/usr/bin/env python3
"""Writes THIRD-PARTY-NOTICES.txt: the licences of the crates in the files that ship. With --check it compares.

The crates are those that cargo builds into the packages of `make build`, for Linux, without build scripts and tests.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "THIRD-PARTY-NOTICES.txt"
SHIPPED = ["ferrogin", "ferrogin-host-plugin", "softefa", "soft-verbs", "soft-gpu", "ferrogin-device-kernels", "ferrogin-host-api"]
NAMES = ("LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE")


def crates() -> list[dict]:
    """The packages from registries, by name and version."""
    packages, edges = {}, {}
    for target in ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"):
        command = ["cargo", "metadata", "--locked", "--format-version=1", f"--filter-platform={target}"]
        metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
        packages.update({package["id"]: package for package in metadata["packages"]})
        for node in metadata["resolve"]["nodes"]:
            normal = [dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
            edges.setdefault(node["id"], set()).update(normal)
    todo = [id for id, package in packages.items() if package["name"] in SHIPPED and package["source"] is None]
    seen = set()
    while todo:
        id = todo.pop()
        # A procedural macro runs in the compiler.
        is_macro = any("proc-macro" in target["kind"] for target in packages[id]["targets"])
        if id not in seen and not is_macro:
            seen.add(id)
            todo += edges.get(id, ())
    found = [packages[id] for id in seen if packages[id]["source"]]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def notices() -> str:
    """The text of the file: a line for each crate, then each licence text with the crates that have it."""
    lines, texts = [], {}
    for package in crates():
        name = f"{package['name']} {package['version']}"
        licence = package["license"] or "see its licence file"
        lines.append(f"{name}: {licence}, {package['repository'] or 'no repository'}")
        directory = Path(package["manifest_path"]).parent
        files = sorted(file for file in directory.iterdir() if file.is_file() and file.name.upper().startswith(NAMES))
        if not files:
            lines[-1] += " (its package has no licence file)"
        for file in files:
            text = "\n".join(line.rstrip() for line in file.read_text(errors="replace").strip().splitlines())
            texts.setdefault(text, []).append(name)
    head = "ferrogin's libraries and tool contain these crates, under the licences below.\n"
    parts = [f"{'=' * 78}\n{', '.join(names)}\n{'=' * 78}\n\n{text}\n" for text, names in texts.items()]
    return head + "\n" + "\n".join(lines) + "\n\n" + "\n".join(parts)


def main() -> int:
    text = notices()
    if sys.argv[1:] == ["--check"]:
        if FILE.read_text() == text:
            return 0
        print("THIRD-PARTY-NOTICES.txt is not that of Cargo.lock: scripts/notices.py writes it again", file=sys.stderr)
        return 1
    FILE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
