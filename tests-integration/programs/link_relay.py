# SPDX-License-Identifier: Apache-2.0
"""Carries frames between two tap devices, late and with losses: netem for kernels without it.

    link_relay.py NEAR FAR SEED

It makes the two devices and prints "ready". Each line on standard input is "DELAY_S LOSS" and is
answered with "ok". It ends when standard input does; the devices go with it.
"""

from __future__ import annotations

import collections
import fcntl
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP_NO_PI = 0x0002 | 0x1000
MAX_FRAME = 65536
BURST = 64


def open_tap(name: str) -> int:
    """Make a tap device and return its descriptor."""
    number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(number, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP_NO_PI))
    return number


class Relay:
    """Two devices, the frames that are under way, and how late and how lossy the way is."""

    def __init__(self, near: str, far: str, seed: int) -> None:
        first, second = open_tap(near), open_tap(far)
        self.other = {first: second, second: first}
        self.under_way: dict[int, collections.deque[tuple[float, bytes]]] = {
            first: collections.deque(),
            second: collections.deque(),
        }
        self.random = random.Random(seed)
        self.delay_s = 0.0
        self.loss = 0.0

    def take(self, source: int) -> None:
        """Read frames from a device; each is lost or gets the time at which it is due."""
        for _ in range(BURST):
            try:
                frame = os.read(source, MAX_FRAME)
            except BlockingIOError:
                return
            except OSError:  # the device is down
                return
            if self.random.random() >= self.loss:
                due = time.monotonic() + self.delay_s
                self.under_way[self.other[source]].append((due, frame))

    def deliver(self) -> float | None:
        """Write what is due and return the seconds until something is, or None."""
        next_due = None
        now = time.monotonic()
        for target, frames in self.under_way.items():
            while frames and frames[0][0] <= now:
                try:
                    os.write(target, frames.popleft()[1])
                except OSError:  # full or down: as on a wire, the frame is lost
                    continue
            if frames:
                next_due = min(frames[0][0], next_due or frames[0][0])
        return None if next_due is None else max(0.0, next_due - now)

    def run(self) -> None:
        """Carry frames until standard input ends."""
        commands = os.fdopen(0, "rb", buffering=0)
        watched = [0, *self.other]
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select(watched, [], [], self.deliver())
            for source in ready:
                if source == 0:
                    words = commands.readline().split()
                    if not words:
                        return
                    self.delay_s, self.loss = (float(word) for word in words)
                    print("ok", flush=True)
                else:
                    self.take(source)


if __name__ == "__main__":
    Relay(sys.argv[1], sys.argv[2], int(sys.argv[3])).run()
