#!/usr/bin/env python3
"""Counts per token what the software cards did, and how often kernels rang them:

    SOFTEFA_TRACE=%p.trace GIN_CHECK=DIR dist/ferrogin gpu -- ...
    dist/ferrogin trace --json FILE... | count.py TOKENS [DIR]

TOKENS is the number of tokens of all ranks and rounds. DIR is an empty directory, to which GPUs write each doorbell.
"""

import collections
import json
import pathlib
import sys

# The record's format, and the event's number: emulators/gin-check/src/event.rs.
DOORBELL = 21


def number(data, at):
    """The LEB128 number at an offset, and the offset behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def events(data):
    """The numbers of a file's events."""
    at = 0
    while at < len(data):
        size, at = number(data, at)
        _, event = number(data, at)  # behind the time
        yield data[event]
        at += size


tokens = int(sys.argv[1])
counts = collections.Counter()
for file in pathlib.Path(sys.argv[2]).glob("gpu.*") if sys.argv[2:] else []:
    counts["doorbells of kernels"] += sum(event == DOORBELL for event in events(file.read_bytes()))
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
