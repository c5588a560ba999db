#!/usr/bin/env python3
"""Transfers with NIXL's back end LIBFABRIC between two agents: nixl_transfers.py listen|connect ADDRESS PORT

In each round, the agent that connects writes a block into the other's memory and reads one back; both check all bytes.
"""

import ctypes
import sys
import time

from nixl import nixl_agent, nixl_agent_config
from peer import Peer, check, pattern

BLOCK = 8 << 20
ROUNDS = 20


def main():
    role, address, port = sys.argv[1:]
    peer = Peer(role, address, port)
    agent = nixl_agent(role, nixl_agent_config(backends=["LIBFABRIC"]))
    memory = ctypes.create_string_buffer(2 * BLOCK)
    base = ctypes.addressof(memory)
    agent.register_memory([(base, 2 * BLOCK, 0, "")], "DRAM")
    metadata, there = peer.exchange([agent.get_agent_metadata().hex(), base])
    other = agent.add_remote_agent(bytes.fromhex(metadata))

    def transfer(operation, here, there):
        local = agent.get_xfer_descs([(here, BLOCK, 0)], "DRAM")
        remote = agent.get_xfer_descs([(there, BLOCK, 0)], "DRAM")
        handle = agent.initialize_xfer(operation, local, remote, other)
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(0)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise SystemExit(f"{operation} of round {number}: {state}")

    for number in range(ROUNDS):
        if peer.first:
            memory[BLOCK : 2 * BLOCK] = pattern(BLOCK, number + 100)
        peer.exchange()
        if not peer.first:
            memory[:BLOCK] = pattern(BLOCK, number)
            transfer("WRITE", base, there)
            transfer("READ", base + BLOCK, there + BLOCK)
            check("read", memory[BLOCK : 2 * BLOCK], BLOCK, number + 100)
        peer.exchange()
        if peer.first:
            check("write", memory[:BLOCK], BLOCK, number)
    peer.exchange()
    print("all data right", flush=True)


main()
