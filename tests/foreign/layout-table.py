#!/usr/bin/env python3
"""Prints static_asserts for one NCCL release from the layout vectors.

usage: layout-table.py VECTORS/efa_layout.json RELEASE

Covers that release's device headers, and the plugin ABI that plugin_abi.h declares. layout_check.cpp includes
the result: it compiles only if NCCL's own structs, ours, and the vectors agree.
"""

import json
import sys

# The plugin ABI's structs in plugin_abi.h; NCCL's headers have none of them.
PLUGIN = {
    "ncclNetVDeviceProps_v12_t",
    "ncclNetProperties_v12_t",
    "ncclNetDeviceHandle_v11_t",
    "ncclGinProperties_v14_t",
    "ncclGinConfig_v14_t",
    "ncclGin_v14_t",
}
QUEUES = {"2.31.2": "0.0.1", "2.32.3": "1.1.0"}


def check(condition, text):
    print(f'static_assert({condition}, "{text}");')


def main():
    if len(sys.argv) != 3 or sys.argv[2] not in QUEUES:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        layout = json.load(file)
    release = sys.argv[2]
    version = QUEUES[release]
    wanted = [
        f"efa-dp-direct {version} queue structs",
        f"efa-dp-direct {version} wire structs",
        f"GIN EFA device handle, NCCL {release}",
        f"GIN device enums, NCCL {release}",
        f"nccl.h, NCCL {release}",
        "NCCL plugin API, aws-ofi-nccl headers",
    ]
    groups = {g["name"]: g for g in layout["groups"]}
    missing = [name for name in wanted if name not in groups]
    if missing:
        sys.exit(f"the vectors have no group {missing}")
    seen = set()
    for name in wanted:
        group = groups[name]
        plugin = name.startswith("NCCL plugin API")
        print(f"// {name}")
        for s in group["structs"]:
            struct = s["name"]
            if plugin and struct not in PLUGIN:
                continue
            seen.add(struct)
            check(f"sizeof({struct}) == {s['size']}", f"size of {struct}")
            check(f"alignof({struct}) == {s['align']}", f"alignment of {struct}")
            for f in s["fields"]:
                member = f"{struct}::{f['name']}"
                check(f"offsetof({struct}, {f['name']}) == {f['offset']}", f"offset of {member}")
                if f["size"]:
                    check(f"sizeof((({struct}*)0)->{f['name']}) == {f['size']}", f"size of {member}")
        for e in group["enums"]:
            if plugin and e["name"] == "ncclDebugLogLevel":
                continue
            for value, number in e["values"].items():
                check(f"(long long)({value}) == {number}", f"{value} of {e['name']}")
        if not plugin:
            for value, number in group["constants"].items():
                check(f"(long long)({value}) == {number}", value)
    if PLUGIN - seen:
        sys.exit(f"the vectors lack {sorted(PLUGIN - seen)}")


if __name__ == "__main__":
    main()
