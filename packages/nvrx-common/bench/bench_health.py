# SPDX-License-Identifier: Apache-2.0
"""Measures health checks: import, a machine without hardware, the event loop under a slow driver.

Each figure is a JSON line with the median. The slow driver is a C library made for the purpose
(needs a C compiler) below the real nvidia-ml-py: one of its calls takes a second.

usage: bench_health.py [--python PY] [--against PY] [--repeats 5]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import _measure

_IMPORT = r"""
import json, sys, time
before_name, name = sys.argv[1:]
if before_name:
    __import__(before_name)
start = time.perf_counter()
__import__(name)
print(json.dumps({"ms": (time.perf_counter() - start) * 1e3}))
"""

_SKIPPED = r"""
import json, logging, sys, time
logging.getLogger("nvrx").addHandler(logging.NullHandler())
from nvidia_resiliency_ext.shared_utils import health_check as h
makers = {
    "gpu": lambda: h.GPUHealthCheck(), "nvlink": lambda: h.NVLHealthCheck(),
    "nvlink_window": lambda: h.NVLinkWindowHealthCheck(), "nic": lambda: h.NicHealthCheck(0),
    "nic_state": lambda: h.NicLinkStateHealthCheck(),
    "storage": lambda: h.DistributedStorageHealthCheck(),
    "storage_path": lambda: h.StoragePathHealthCheck([]),
    "node_daemon": lambda: h.NodeHealthCheck("/nonexistent"),
}
worst, total, broken = 0.0, 0.0, []
for name, make in makers.items():
    start = time.perf_counter()
    try:
        make()()
    except Exception as error:
        broken.append(f"{name}: {type(error).__name__}")
    took = (time.perf_counter() - start) * 1e3
    worst, total = max(worst, took), total + took
print(json.dumps({"ms": total, "slowest_ms": worst, "raised": broken}))
"""

_STALL = r"""
import asyncio, json, logging, os, time
logging.getLogger("nvrx").addHandler(logging.NullHandler())
logging.getLogger("nvrx").propagate = False
from nvidia_resiliency_ext.shared_utils.health_check import GPUHealthCheck

async def main():
    done = asyncio.Event()
    async def on_failure():
        done.set()
    check = GPUHealthCheck(interval=0.2, on_failure=on_failure)
    os.replace(os.environ["FAKE_NVML_SLOW"], os.environ["FAKE_NVML_CONTROL"])
    task = asyncio.create_task(check.async_check())
    begin = last = time.perf_counter()
    worst = 0.0
    while not done.is_set() and last - begin < 60:
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    task.cancel()
    return worst, last - begin

worst, took = asyncio.run(main())
print(json.dumps({"ms": worst * 1e3, "check_s": took}))
"""

_ROOT = Path(__file__).resolve().parents[1]
_SOURCE = _ROOT / "src/nvidia_resiliency_ext/testing_utils/nvml.c"
_MODULE = "nvidia_resiliency_ext.shared_utils.health_check"
# The driver asks for a reset of its GPU, so that on_failure ends the program.
_ANSWERS = "count 1\nfield.0.230 1\n"
_SLOW = f"{_ANSWERS}delay_ms.nvmlDeviceGetFieldValues 1000\n"


def main() -> None:
    """Print one line per figure and interpreter."""
    options = _measure.parser(__doc__).parse_args()
    for name, python in _measure.interpreters(options):
        calls = {"import": ["", _MODULE], "import over_pkgutil": ["pkgutil", _MODULE]}
        found = _measure.medians(python, _IMPORT, calls, options.repeats)
        for label, figures in found.items():
            _measure.show("health", name, label, figures, key="ms")
        found = _measure.medians(python, _SKIPPED, {"nothing there": []}, options.repeats)
        _measure.show("health", name, "nothing there", found["nothing there"], key="ms")
        _show_stall(name, python, options.repeats)


def _show_stall(name: str, python: str, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        compiler = shutil.which("cc")
        if compiler is None:
            print(json.dumps({"bench": "health", "python": name, "error": "no C compiler"}))
            return
        library = Path(folder, "libnvidia-ml.so.1")
        soname = "-Wl,-soname,libnvidia-ml.so.1"
        command = [compiler, "-shared", "-fPIC", soname, "-o", str(library), str(_SOURCE)]
        subprocess.run(command, check=True)
        control, slow = Path(folder, "control"), Path(folder, "slow")
        os.environ["LD_LIBRARY_PATH"] = folder
        os.environ["FAKE_NVML_CONTROL"] = str(control)
        os.environ["FAKE_NVML_SLOW"] = str(slow)
        runs = []
        for _ in range(repeats):
            control.write_text(_ANSWERS)
            slow.write_text(_SLOW)
            runs.append(_measure.medians(python, _STALL, {"": []}, 1)[""])
        for variable in ("LD_LIBRARY_PATH", "FAKE_NVML_CONTROL", "FAKE_NVML_SLOW"):
            del os.environ[variable]
    runs.sort(key=lambda run: run.get("ms", 0.0))
    label = "event loop, driver call of 1 s"
    _measure.show("health", name, label, runs[len(runs) // 2], key="ms")


if __name__ == "__main__":
    sys.exit(main())
