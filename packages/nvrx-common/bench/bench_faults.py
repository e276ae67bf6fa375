# SPDX-License-Identifier: Apache-2.0
"""Measures faults and node tools: how late a fault is, what a dispatch costs, how fast tools are.

Cases, each a JSON line with medians over the repeats:
``dispatch``: milliseconds that the call takes. ``late``: milliseconds from the time that the call
asked for to the effect: the flag of WORKLOAD_EXC in an idle and in a busy
process; the end of a process through SIGKILL, as its parent sees it. ``wait_daemon``: milliseconds
from the end of a process to the return. ``storage_probe``: milliseconds of the whole program, bare
interpreter beside it.

usage: bench_faults.py [--python PY] [--against PY] [--repeats 9]
"""

from __future__ import annotations

import _measure

_FIND = r"""
import importlib, json, os, subprocess, sys, threading, time
def find(*names):
    for name in names:
        try:
            return importlib.import_module("nvidia_resiliency_ext." + name)
        except ModuleNotFoundError:
            pass
    sys.exit("there is no " + names[0])
def faults():
    return find("shared_utils.inject_fault", "inprocess.tools.inject_fault")
def show(**figures):
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}))
"""
_FLAG = (
    _FIND
    + r"""
module = faults()
if sys.argv[1] == "busy":
    def spin():
        while True:
            pass
    threading.Thread(target=spin, daemon=True).start()
module.dispatch_fault_injection(module.Fault.WORKLOAD_EXC, 0.0, None)
time.sleep(0.2)
module.clear_workload_exception()
start = time.perf_counter()
module.dispatch_fault_injection(module.Fault.WORKLOAD_EXC, 0.3, None)
took = time.perf_counter() - start
while True:
    try:
        module.maybe_raise_workload_exception()
    except module.InjectedException:
        break
    time.sleep(0.0002)
show(ms=(time.perf_counter() - start - 0.3) * 1e3, dispatch_ms=took * 1e3)
sys.stdout.flush()
os._exit(0)
"""
)
_KILL_CHILD = (
    _FIND
    + r"""
module = faults()
start = time.monotonic()
module.dispatch_fault_injection(module.Fault.SIGKILL, 0.5, None)
print(start, time.monotonic() - start, flush=True)
time.sleep(60)
"""
)
_KILL = (
    _FIND
    + f"CHILD = {_KILL_CHILD!r}\n"
    + r"""
process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", CHILD], text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
start, took = map(float, process.stdout.readline().split())
process.wait()
show(ms=(time.monotonic() - start - 0.5) * 1e3, dispatch_ms=took * 1e3)
"""
)
_WAIT = (
    _FIND
    + r"""
module = find("shared_utils.wait_daemon")
process = subprocess.Popen(["sleep", "60"])
killed = []
def kill():
    time.sleep(0.3)
    killed.append(time.perf_counter())
    process.kill()
    process.wait()
threading.Thread(target=kill).start()
module.wait_for_pids([process.pid])
show(ms=(time.perf_counter() - killed[0]) * 1e3)
"""
)
_PROBE = (
    _FIND
    + r"""
import nvidia_resiliency_ext
find("shared_utils.storage_probe")
path = os.pathsep.join(os.path.dirname(each) for each in nvidia_resiliency_ext.__path__)
def run(*arguments):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-S", *arguments], stdout=subprocess.DEVNULL, check=True,
                   env={**os.environ, "PYTHONPATH": path})
    return (time.perf_counter() - start) * 1e3
run("-c", "pass")
show(bare_ms=run("-c", "pass"),
     ms=run("-m", "nvidia_resiliency_ext.shared_utils.storage_probe", "--", "/tmp"))
"""
)
_CASES = {
    "late WORKLOAD_EXC idle": (_FLAG, ["idle"]),
    "late WORKLOAD_EXC busy": (_FLAG, ["busy"]),
    "late SIGKILL": (_KILL, []),
    "wait_daemon": (_WAIT, []),
    "storage_probe": (_PROBE, []),
}


def main() -> None:
    """Print one line per case and interpreter."""
    options = _measure.parser(__doc__, repeats=9).parse_args()
    for name, python in _measure.interpreters(options):
        for label, (program, arguments) in _CASES.items():
            found = _measure.medians(python, program, {label: arguments}, options.repeats)
            _measure.show("faults", name, label, found[label], key="ms")


if __name__ == "__main__":
    main()
