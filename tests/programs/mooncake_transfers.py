#!/usr/bin/env python3
"""Transfers with Mooncake's transfer engine between two processes: mooncake_transfers.py listen|connect ADDRESS PORT

Both initialize an engine for EFA. The one that connects writes blocks into the other's memory and reads them back; both check all bytes.
"""

import ctypes
import sys

from mooncake.engine import TransferEngine
from peer import Peer, check, pattern

LENGTHS = [1, 8, 4096, 8929, 65536, 1 << 20, 8 << 20]
SIZE = sum(LENGTHS)


def main():
    peer = Peer(*sys.argv[1:])
    engine = TransferEngine()
    if engine.initialize(peer.own, "P2PHANDSHAKE", "efa", "") != 0:
        raise SystemExit("TransferEngine.initialize failed")
    memory = ctypes.create_string_buffer(2 * SIZE)
    base = ctypes.addressof(memory)
    if engine.register_memory(base, 2 * SIZE) != 0:
        raise SystemExit("register_memory failed")
    name, there = peer.exchange([f"{peer.own}:{engine.get_rpc_port()}", base])
    at = 0
    for number, length in enumerate(LENGTHS):
        if not peer.first:
            memory[at : at + length] = pattern(length, number)
            if engine.transfer_sync_write(name, base + at, there + at, length) != 0:
                raise SystemExit(f"write {number} of {length} bytes failed")
            if engine.transfer_sync_read(name, base + SIZE + at, there + at, length) != 0:
                raise SystemExit(f"read {number} of {length} bytes failed")
            check("read", memory[SIZE + at : SIZE + at + length], length, number)
        peer.exchange()
        if peer.first:
            check("write", memory[at : at + length], length, number)
        at += length
    peer.exchange()
    print("all data right", flush=True)


main()
