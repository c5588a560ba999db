#!/usr/bin/env python3
"""Writes THIRD-PARTY-NOTICES.txt, the licences of the crates in the files that ship, and sbom.cdx.json, their machine-readable list
(CycloneDX). Fails if a crate has no licence in ALLOWED, or occurs in two versions. With --check, compares the files and writes nothing.

The crates are those that cargo builds into `make build`'s packages for Linux, without build scripts and tests.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The permissive licences; one is enough in an expression with OR.
ALLOWED = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "Unicode-3.0", "Zlib"}
SHIPPED = ["ferrogin", "ferrogin-host-plugin", "softefa", "soft-verbs", "soft-gpu", "ferrogin-device-kernels", "ferrogin-host-api"]
NAMES = ("LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE")


def crates() -> list[dict]:
    """Returns the packages from registries, sorted by name and version."""
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
        # A procedural macro only runs in the compiler.
        is_macro = any("proc-macro" in target["kind"] for target in packages[id]["targets"])
        if id not in seen and not is_macro:
            seen.add(id)
            todo += edges.get(id, ())
    found = [packages[id] for id in seen if packages[id]["source"]]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def expression(package: dict) -> str:
    """Returns the crate's licence as an SPDX expression."""
    return (package["license"] or "").replace("/", " OR ")


def problems(packages: list[dict]) -> list[str]:
    """Returns licences that are not allowed, and crates that ship in two versions."""
    found = []
    for package in packages:
        choices = expression(package).strip("()").split(" OR ")
        if not any(set(choice.split(" AND ")) <= ALLOWED for choice in choices):
            found.append(f"{package['name']} {package['version']} has the licence {package['license']!r}, which ALLOWED lacks")
    names = [package["name"] for package in packages]
    return found + [f"two versions of {name} ship: align them in the Cargo.toml that asks for the old one" for name in sorted(set(names)) if names.count(name) > 1]


def sbom(packages: list[dict]) -> str:
    """Returns the crates as CycloneDX, without times and random numbers, so that the same crates give the same file."""
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:cargo/{package['name']}@{package['version']}",
            "name": package["name"],
            "version": package["version"],
            "licenses": [{"expression": expression(package)}],
            "purl": f"pkg:cargo/{package['name']}@{package['version']}",
        }
        for package in packages
    ]
    component = {"type": "application", "bom-ref": "ferrogin", "name": "ferrogin", "version": version, "licenses": [{"expression": "Apache-2.0"}]}
    bom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": component}, "components": components}
    return json.dumps(bom, indent=1) + "\n"


def notices(packages: list[dict]) -> str:
    """Returns the file's text: a line per crate, then each licence text with the crates that have it."""
    lines, texts = [], {}
    for package in packages:
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
    packages = crates()
    failures = problems(packages)
    for name, text in (("THIRD-PARTY-NOTICES.txt", notices(packages)), ("sbom.cdx.json", sbom(packages))):
        file = ROOT / name
        if sys.argv[1:] != ["--check"]:
            file.write_text(text)
        elif not file.is_file() or file.read_text() != text:
            failures.append(f"{name} is not that of Cargo.lock: scripts/notices.py writes it again")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
