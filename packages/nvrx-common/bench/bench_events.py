# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of recording one event: to nothing, to a file, and reading them again.

Each figure is a JSON line: the median over repetitions, each in an interpreter of its own.
``raw_write`` is what encoding and writing the same line costs without any of our code.

usage: bench_events.py [--python PY] [--against PY] [--events 20000] [--repeats 5]
"""

from __future__ import annotations

import _measure

_PROGRAM = r"""
import json, os, sys, tempfile, time
mode, count = sys.argv[1], int(sys.argv[2])
with tempfile.TemporaryDirectory() as directory:
    if mode == "raw_write":
        fd = os.open(directory + "/raw", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        encode = json.JSONEncoder(separators=(",", ":")).encode
        def step():
            os.write(fd, encode({"t": time.time(), "m": time.monotonic(), "kind": "fault",
                                 "src": "launcher", "cycle": 0, "rank": 1, "pid": os.getpid(),
                                 "cause": "killed", "what": "signal 9"}).encode() + b"\n")
    else:
        from nvidia_resiliency_ext.shared_utils.events import (
            NULL_EVENTS, EventLog, Fault, read_events)
        event = Fault(cause="killed", what="signal 9")
        log = NULL_EVENTS if mode == "record_to_nothing" else EventLog.create(
            directory, src="launcher", job_id="1", launch_id="b", host="n")
        def step():
            log.record(event, cycle=0, rank=1)
    for _ in range(200):
        step()
    start = time.perf_counter()
    for _ in range(count):
        step()
    if mode == "read":
        start = time.perf_counter()
        read_events(log.path)
    print(json.dumps({"us": (time.perf_counter() - start) / count * 1e6}))
"""
_MODES = ("raw_write", "record_to_nothing", "record_to_file", "read")


def main() -> None:
    """Print one line per mode and interpreter."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--events", type=int, default=20_000)
    options = parser.parse_args()
    calls = {mode: [mode, str(options.events)] for mode in _MODES}
    for name, python in _measure.interpreters(options):
        found = _measure.medians(python, _PROGRAM, calls, options.repeats)
        for mode in _MODES:
            base = found["raw_write"].get("us") if mode == "record_to_file" else None
            _measure.show("event", name, mode, found[mode], key="us", base=base)


if __name__ == "__main__":
    main()
