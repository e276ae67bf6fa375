# SPDX-License-Identifier: Apache-2.0
"""Time of `ft_launcher --help` and of a wrong command line, against other interpreters.

    python bench_help.py [--python PYTHON] [--against PYTHON] [--repeats N]

Prints one JSON object per figure: the median and the 95th percentile of wall seconds, and the ratio
of the medians where there is something to compare with. `bare` is the interpreter alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

CASES = {
    "bare": ["-c", "pass"],
    "help": ["-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--help"],
    "wrong_flag": ["-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--max-restarts=x", "s"],
}


def seconds(python: str, words: list[str]) -> float:
    """Return how long one run takes."""
    started = time.perf_counter()
    subprocess.run(
        [python, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    return time.perf_counter() - started


def figure(name: str, python: str, samples: list[float]) -> dict[str, object]:
    """Return what is printed about the runs of one interpreter."""
    ordered = sorted(samples)
    return {
        "figure": f"launcher_{name}_s",
        "python": python,
        "median": round(statistics.median(ordered), 4),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 4),
        "runs": len(ordered),
    }


def main() -> None:
    """Measure all cases, the interpreters in turn, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter to measure")
    parser.add_argument("--against", help="interpreter to compare with")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    pythons = [options.python, *([options.against] if options.against else [])]
    for name, words in CASES.items():
        samples: dict[str, list[float]] = {python: [] for python in pythons}
        for python in pythons:
            seconds(python, words)
        # In turn, so that a busy minute of the host hits all alike.
        for _ in range(options.repeats):
            for python in pythons:
                samples[python].append(seconds(python, words))
        figures = [figure(name, python, samples[python]) for python in pythons]
        if options.against:
            ratio = statistics.median(samples[options.against]) / statistics.median(
                samples[options.python]
            )
            figures[0]["against_is_times"] = round(ratio, 2)
        for each in figures:
            print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
