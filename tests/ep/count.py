#!/usr/bin/env python3
"""Counts what the software cards did, per token: dist/ferrogin trace --json FILE... | count.py TOKENS

TOKENS is the number of tokens of all ranks and rounds.
"""

import collections
import json
import sys

tokens = int(sys.argv[1])
counts = collections.Counter()
for line in sys.stdin:
    event = json.loads(line)
    if event["event"] == "counted":
        counts["signals counted by the card"] += 1
    if event["event"] != "request":
        continue
    fields = {field["name"]: field["value"] for field in event["decoded"]["fields"]}
    counts["posts"] += 1
    counts["bytes"] += event["bytes"]
    if event["op"] == "send":
        counts["messages: sends"] += 1
    elif fields.get("ctrl1.has_imm"):
        counts["messages: writes with immediate data"] += 1
    elif event["bytes"] == 0:
        counts["empty writes"] += 1
for name, count in sorted(counts.items()):
    print(f"{name}: {count}, {count / tokens:.2f} per token")
