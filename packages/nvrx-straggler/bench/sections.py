# SPDX-License-Identifier: Apache-2.0
"""Processor time of a section, a skipped or paused one and a wrapped call, in microseconds."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import timeit

PROGRAM_FLAG = "--here"
NUMBER = 20_000
REPEATS = 9


class Trainer:
    """Has a method to wrap."""

    def step(self) -> None:
        """Do nothing."""


def per_call_us(statement: str, names: dict[str, object]) -> float:
    """Return the median cost of a statement."""
    runs = timeit.repeat(
        statement, timer=time.thread_time, globals=names, number=NUMBER, repeat=REPEATS
    )
    return statistics.median(runs) / NUMBER * 1e6


def measure() -> None:
    """Print one JSON line per figure; costs are above those of an empty loop or a plain call."""
    from nvidia_resiliency_ext.attribution import straggler

    detector = straggler.Detector
    section = "with section('s', profile_cuda=False): pass"
    trainer = Trainer()
    plain = per_call_us("trainer.step()", {"trainer": trainer})
    show("nullcontext", per_call_us("with section(): pass", {"section": contextlib.nullcontext}))
    for interval in (1, 1000):
        detector.initialize(
            scores_to_compute=["individual_perf_scores"],
            gather_on_rank0=False,
            profiling_interval=interval,
        )
        show(f"section_interval_{interval}", per_call_us(section, {
            "section": detector.detection_section}))  # fmt: skip
        detector.wrap_callables(
            callable_ids=[straggler.CallableId(trainer, "step")], profile_cuda=False
        )
        show(f"wrapped_call_interval_{interval}",
             per_call_us("trainer.step()", {"trainer": trainer}) - plain)  # fmt: skip
        if hasattr(detector, "pause"):
            detector.pause()
            show(f"section_paused_{interval}", per_call_us(section, {
                "section": detector.detection_section}))  # fmt: skip
        detector.shutdown()


def show(figure: str, value: float) -> None:
    """Print a figure in microseconds with the load of the machine."""
    line = {"figure": figure, "us": round(value, 3), "load": os.getloadavg()[0]}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument(PROGRAM_FLAG, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        measure()
    else:
        subprocess.run([options.python, __file__, PROGRAM_FLAG], check=True, timeout=600)
