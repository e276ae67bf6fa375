# SPDX-License-Identifier: Apache-2.0
"""Cost of a kernel record in the extension, and memory of its statistics, over a fake libcupti."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "tests" / "native" / "fake_cupti.cpp"
ROUNDS = 15


def measure(library_path: str) -> None:
    """Print one JSON line per figure."""
    os.environ["NVRX_CUPTI_LIBRARY"] = library_path
    import nvrx_cupti_module

    library = ctypes.CDLL(library_path)
    library.fake_cost_ns.restype = ctypes.c_double
    library.fake_run.argtypes = [ctypes.c_int] * 3 + [ctypes.c_int64] * 2
    for kernels in (50, 500, 5000):
        profiler = nvrx_cupti_module.CuptiProfiler(
            bufferSize=8 << 20, numBuffers=2, statsMaxLenPerKernel=2000
        )
        profiler.initialize()
        library.fake_cost_ns(kernels, 2)
        costs = [library.fake_cost_ns(kernels, 1) for _ in range(ROUNDS)]
        show("record_ns", statistics.median(costs), kernels=kernels, least=min(costs))
        profiler.shutdown()
        del profiler
    profiler = nvrx_cupti_module.CuptiProfiler(8 << 20, 2, 2000)
    profiler.initialize()
    profiler.start()
    library.fake_run(0, 500, 500 * 2000, 1000, 1)
    profiler.get_stats()
    spent = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        profiler.get_stats()
        spent.append((time.thread_time() - begin) * 1e3)
    show("get_stats_ms", statistics.median(spent), kernels=500, samples=2000)
    profiler.shutdown()
    del profiler
    profiler = nvrx_cupti_module.CuptiProfiler(8 << 20, 2, 200)
    profiler.initialize()
    profiler.start()
    library.fake_run(0, 5000, 5000 * 200, 1000, 1)
    profiler.get_stats()
    show("memory_mb", profiler.memory_bytes / 1e6, kernels=5000, samples=200)
    profiler.shutdown()


def show(figure: str, value: float, **more: float) -> None:
    """Print a figure with the load of the machine."""
    print(json.dumps({"figure": figure, "value": round(value, 3), **more,
                      "load": os.getloadavg()[0]}), flush=True)  # fmt: skip


def main() -> None:
    """Compile the fake and measure in the chosen interpreter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--library", help="measure here, with this fake")
    options = parser.parse_args()
    if options.library:
        measure(options.library)
        return
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "libcupti_fake.so")
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread"]
        subprocess.run(["c++", *flags, str(SOURCE), "-o", library], check=True, timeout=300)
        subprocess.run([options.python, __file__, "--library", library], check=True, timeout=600)


if __name__ == "__main__":
    main()
