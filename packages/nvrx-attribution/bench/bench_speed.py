# SPDX-License-Identifier: Apache-2.0
"""Print how fast logs and traces are read, one JSON line per figure.

`python packages/nvrx-attribution/bench/bench_speed.py [--mb 200] [--ranks 1024,4096]`
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
REPEATS = 3
STARTS = 7
HELP = (
    "import sys; sys.argv = ['nvrx-attribution', '--help']\n"
    "from nvidia_resiliency_ext.attribution.cli import main; main()"
)
STEP_ON = "".join(
    f"iteration {n}/ 9 | consumed samples: {n} | lm loss: 2.0 |\n" for n in range(1, 6)
)
ECC = "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
STEP = (
    "{r}: [2026-01-02 10:{m:02d}:{s:02d}.{ms:03d}] iteration {i}/ 500000 | consumed samples: {i} |"
    " elapsed time per iteration (ms): {ms}.1 | lm loss: 2.{ms}E+00 | grad norm: 1.{s} |\n"
)
INFO = (
    "{r}: 2026-01-02 10:{m:02d}:{s:02d},{ms:03d} INFO loader.py:{s} rank {r} read shard {i} of"
    " part-{ms:05d} in 0.{ms} s\n"
)
FAILURE = (
    "[rank{r}]: Traceback (most recent call last):\n"
    '[rank{r}]:   File "/app/train.py", line {s}, in main\n[rank{r}]:     step(batch)\n'
    '[rank{r}]:   File "/app/model.py", line {m}, in step\n[rank{r}]:     return a @ b\n'
    "[rank{r}]: RuntimeError: mat1 and mat2 shapes cannot be multiplied ({i}x8 and 16x4)\n"
)
SCAN = """
import sys, time, resource
from nvidia_resiliency_ext.attribution import engine
engine.load_registry().anchors
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
verdict = engine.analyze(sys.argv[1])
used = time.process_time() - start
print(used, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024, verdict.reason_code)
"""
SNAPSHOT = """
import statistics, sys, time
from nvidia_resiliency_ext.attribution import engine
scanner, took = engine.LogScanner(), []
with open(sys.argv[1], "rb") as log:
    while data := log.read(1 << 17):
        scanner.feed(data)
        start = time.process_time()
        scanner.snapshot()
        took.append(time.process_time() - start)
half = len(took) // 2
print(*(statistics.quantiles(part, n=100)[98] for part in (took[:half], took[half:])))
"""
TRACES = """
import sys, time, resource
from nvidia_resiliency_ext.attribution._traces.loading import load_traces
from nvidia_resiliency_ext.attribution._traces.analysis import analyze_dumps
start = time.perf_counter()
loaded = load_traces(sys.argv[1])
middle = time.perf_counter()
found = analyze_dumps(loaded)
end = time.perf_counter()
own, workers = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
used = [resource.getrusage(who) for who in (own, workers)]
# ru_maxrss of this process would count the memory of the program that started it.
with open("/proc/self/status") as file:
    own_kib = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
peak = max(own_kib, used[1].ru_maxrss)
cpu = sum(each.ru_utime + each.ru_stime for each in used)
print(middle - start, end - middle, peak / 1024, cpu, *found.guilty_ranks)
"""


def write_log(path: Path, size: int, texts: tuple[str, ...], ending: str = "") -> None:
    """Write a log of 64 ranks of about `size` bytes."""
    lines = []
    for i in range(20_000):
        values = {"r": i % 64, "i": i, "m": i % 60, "s": i % 59, "ms": i * 7 % 1000}
        lines.append(texts[i % len(texts)].format(**values))
    part = "".join(lines).encode()
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(part)
        file.write(ending.encode())


def measure(python: str, code: str, argument: str) -> list[list[str]]:
    """Return the words that a program prints, of each repeat."""
    command = [python, "-c", code, argument]
    return [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        for _ in range(REPEATS)
    ]


def report(figure: str, **values: object) -> None:
    """Print one figure with the machine's load."""
    print(
        json.dumps({"figure": figure, **values, "load": round(os.getloadavg()[0], 1)}), flush=True
    )


def main() -> None:
    """Measure scan, traces and import."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter to measure")
    parser.add_argument("--mb", type=int, default=200, help="size of the logs (%(default)s)")
    parser.add_argument("--ranks", default="1024,4096", help="sizes of the traces (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "job.log"
        for name, texts, share in (("plain", (STEP, INFO, INFO), 1.0), ("dense", (FAILURE,), 0.2)):
            write_log(log, int(args.mb * 1e6 * share), texts, "[rank3]: CUDA out of memory.\n")
            runs = measure(args.python, SCAN, str(log))
            seconds = statistics.median(float(run[0]) for run in runs)
            size = log.stat().st_size / 1e6
            mib = max(float(run[1]) for run in runs)
            report(
                f"scan_{name}", mb=round(size), mb_per_cpu_s=round(size / seconds), mib=round(mib)
            )
        runs = measure(args.python, SNAPSHOT, str(log))
        early, late = (1000 * statistics.median(float(r[at]) for r in runs) for at in (0, 1))
        # Of a log that grows: it must not take longer in its second half.
        report("snapshot", mb=round(size), p99_ms=round(late, 1), p99_ms_first_half=round(early, 1))
        log.unlink()
        measure_traces(args.python, args.ranks, Path(folder))
        measure_follow(args.python, Path(folder))
    # An installed program starts without the -c of this one: the empty interpreter is subtracted.
    names = {"import": "import nvidia_resiliency_ext.attribution", "help": HELP}
    for name, code in names.items():
        starts = []
        for _ in range(STARTS):
            empty = cpu_seconds([args.python, "-c", "pass"])
            whole = cpu_seconds([args.python, "-c", code])
            starts.append(whole if name == "help" else whole - empty)
        report(name, ms=round(1000 * statistics.median(starts)), of="CPU time")


def cpu_seconds(command: list[str]) -> float:
    """Return the CPU time of a program: on a busy machine its wall time says little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure_follow(python: str, folder: Path) -> None:
    """Measure from the last byte of a followed log to the printed verdict."""
    log = folder / "followed.log"
    log.touch()
    module = "nvidia_resiliency_ext.attribution"
    command = [python, "-m", module, "analyze", str(log), "--follow", "--json", "--quiet-s", "60"]
    waits = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        program.stdout.readline()
        faults = ("[rank1]: OSError: [Errno 28] No space left on device\n", STEP_ON, ECC)
        for text in faults:
            with log.open("a") as file:
                file.write(text)
            begin = time.perf_counter()
            program.stdout.readline()
            waits.append(time.perf_counter() - begin)
        program.kill()
    report("follow", verdict_s=round(max(waits), 2))


def measure_traces(python: str, sizes: str, folder: Path) -> None:
    """Measure loading and analysis of dumps of 40 entries."""
    sys.path.insert(0, str(HELPERS))
    import attribution_traces

    used = {}
    for size in map(int, sizes.split(",")):
        job = attribution_traces.make_job("host_stuck", size, 3, steps=6)
        for dump in job.dumps.values():
            dump["entries"] = dump["entries"][-40:]
        target = attribution_traces.write(job, folder / str(size))
        runs = measure(python, TRACES, str(target))
        load, analyse = (statistics.median(float(run[at]) for run in runs) for at in (0, 1))
        peak = max(float(run[2]) for run in runs)
        cpu_s = statistics.median(float(run[3]) for run in runs)
        used[size] = cpu_s
        right = [int(rank) for rank in runs[0][4:]] == job.guilty
        report(
            "traces",
            ranks=size,
            load_s=round(load, 2),
            analyse_s=round(analyse, 2),
            load_and_analyse_s=round(load + analyse, 2),
            cpu_s=round(cpu_s, 2),  # with the start of the program, and of all processes
            mib=round(peak),
            right=right,
        )
    if len(used) > 1:
        doublings = math.log2(max(used) / min(used))
        ratio = (used[max(used)] / used[min(used)]) ** (1 / doublings)
        report("traces_growth", cpu_s_for_twice_the_ranks=round(ratio, 2))


if __name__ == "__main__":
    main()
