# SPDX-License-Identifier: Apache-2.0
"""Writes numbered lines to a log server and says how far it is; its parent may kill it."""

import argparse
import sys
import threading
import time

from nvidia_resiliency_ext.shared_utils.grpc_log_client import LogFunnelClient


def main() -> None:
    """Write lines at a rate, then close; or wait for a line on stdin first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("path")
    parser.add_argument("--lines", type=int, default=16000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2000.0)
    parser.add_argument("--spill-dir")
    parser.add_argument("--memory", type=int, default=64 << 20)
    parser.add_argument("--close", choices=("wait", "never", "forget"), default="wait")
    options = parser.parse_args()
    client = LogFunnelClient(
        options.endpoint,
        node_id="writer",
        spill_dir=options.spill_dir,
        spill_name="writer",
        memory_limit_bytes=options.memory,
    )
    target = client.open(options.path)
    print("open", flush=True)
    start, tick = time.monotonic(), threading.Event()
    for number in range(options.lines):
        target.write(b"%08d %s\n" % (options.first + number, b"z" * 90))
        if number % 50 == 49:
            print(number + 1, flush=True)
            tick.wait(max(0.0, start + (number + 1) / options.rate - time.monotonic()))
    print("written", flush=True)
    if options.close == "never":
        sys.stdin.readline()
    if options.close == "wait":
        print("closed", client.close(), flush=True)


if __name__ == "__main__":
    main()
