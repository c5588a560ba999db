"""A test's other process: a stream on which the two exchange one JSON value at a time."""

import json
import socket
import time


class Peer:
    """`listen ADDRESS PORT` waits for the process started as `connect ADDRESS PORT`."""

    def __init__(self, role, address, port):
        self.first = role == "listen"
        if self.first:
            with socket.create_server((address, int(port))) as server:
                self.stream = server.accept()[0]
        else:
            self.stream = connect(address, int(port))
        # The address at which the other process reaches this one.
        self.own = self.stream.getsockname()[0]
        self.lines = self.stream.makefile("r")

    def exchange(self, value=None):
        """Sends a value and returns the peer's. Both wait for each other here."""
        self.stream.sendall(f"{json.dumps(value)}\n".encode())
        line = self.lines.readline()
        if not line:
            raise SystemExit("the other process ended before this one")
        return json.loads(line)


def connect(address, port):
    """Connects as soon as the other process listens; the test has its own time limit."""
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.05)


def pattern(length, number):
    """The bytes of transfer `number`, which differ from every other transfer's at every position."""
    block = bytes((at * 7 + (at >> 8) + number * 31) & 0xFF for at in range(65536))
    return (block * (length // len(block) + 1))[:length]


def check(what, got, length, number):
    """Exits if the bytes aren't those of transfer `number`."""
    expected = pattern(length, number)
    if got != expected:
        at = next(at for at in range(length) if got[at] != expected[at])
        raise SystemExit(f"{what} {number}: byte {at} of {length} is {got[at]} and must be {expected[at]}")
