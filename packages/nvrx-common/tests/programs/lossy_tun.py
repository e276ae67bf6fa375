# SPDX-License-Identifier: Apache-2.0
"""A network device that loses and delays packets, for kernels without `tc netem`.

The machine is 10.9.0.1; what it sends to 10.9.0.2 comes back to it with the two addresses changed
for each other. So two programs of one network namespace talk over a bad line, and the checksums,
being sums of both addresses, stay right.
"""

import argparse
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import time

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_IPV4 = 4
_MTU = 1500


def open_device(name: str) -> int:
    """Make the device and give it its address."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (f"addr add 10.9.0.1/24 dev {name}", f"link set {name} up"):
        subprocess.run(["ip", *command.split()], check=True)
    return fd


def main() -> None:
    """Pass packets on until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loss", type=float, default=0.05)
    parser.add_argument("--delay-s", type=float, default=0.005)
    parser.add_argument("--jitter-s", type=float, default=0.003)
    options = parser.parse_args()
    fd, draw = open_device("lossy0"), random.Random(1)
    print("up", flush=True)
    held: list[tuple[float, int, bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while held and held[0][0] <= now:
            os.write(fd, heapq.heappop(held)[2])
        timeout_s = max(0.0, held[0][0] - now) if held else None
        if not select.select([fd], [], [], timeout_s)[0]:
            continue
        packet = os.read(fd, _MTU)
        if packet[0] >> 4 != _IPV4 or draw.random() < options.loss:
            continue
        count += 1
        delay_s = options.delay_s + draw.uniform(-options.jitter_s, options.jitter_s)
        back = packet[:12] + packet[16:20] + packet[12:16] + packet[20:]
        heapq.heappush(held, (time.monotonic() + delay_s, count, back))


if __name__ == "__main__":
    main()
