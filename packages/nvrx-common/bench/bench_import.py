# SPDX-License-Identifier: Apache-2.0
"""Measures what importing each public module of nvrx-common costs in a fresh interpreter.

Each figure is a JSON line: the median time, the number of new modules, third-party packages among
them. ``over_json`` starts the clock after ``json``, ``over_pkgutil`` after ``pkgutil``.

usage: bench_import.py [--python PY] [--against PY] [--repeats 7] [MODULE ...]
"""

from __future__ import annotations

import _measure

_PROGRAM = r"""
import json, sys, time
before_name, name = sys.argv[1:]
if before_name:
    __import__(before_name)
before = set(sys.modules)
start = time.perf_counter()
try:
    __import__(name)
    error = None
except ImportError as found:
    error = f"{type(found).__name__}: {found}"[:100]
seconds = time.perf_counter() - start
new = set(sys.modules) - before
known = set(sys.stdlib_module_names) | {"nvidia_resiliency_ext"}
foreign = sorted({each.partition(".")[0] for each in new if each[0] != "_"} - known)
print(json.dumps({"ms": seconds * 1e3, "modules": len(new), "third_party": foreign,
                  "error": error}))
"""
_ROOT = "nvidia_resiliency_ext"
_SHARED = f"{_ROOT}.shared_utils"
_NAMES = (
    "log_manager",
    "log_node_local_tmp",
    "events",
    "report",
    "doctor",
    "os_utils",
    "children",
    "inject_fault",
    "storage_probe",
    "wait_daemon",
    "profiling",
    "job_metadata",
    "health_check",
    "memory",
)
_MODULES = (_SHARED, *(f"{_SHARED}.{name}" for name in _NAMES))


def main() -> None:
    """Print one line per module and interpreter."""
    parser = _measure.parser(__doc__, repeats=7)
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    options = parser.parse_args()
    calls = {f"{_ROOT} over_pkgutil": ["pkgutil", _ROOT]}
    if not options.modules:
        calls[f"{_SHARED}.events over_json"] = ["json", f"{_SHARED}.events"]
    calls |= {name: ["", name] for name in options.modules or _MODULES}
    for name, python in _measure.interpreters(options):
        found = _measure.medians(python, _PROGRAM, calls, options.repeats)
        for label in calls:
            _measure.show("import", name, label, found[label], key="ms")


if __name__ == "__main__":
    main()
