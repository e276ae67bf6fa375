# SPDX-License-Identifier: Apache-2.0
"""Run a program as the ranks of one node, forked from this process, which imports torch for all.

Arguments: the modules to import, with commas; how many ranks; the directory of their logs; the
program and its arguments. Prints the ranks' process numbers, and when all have ended their exit
codes. With this process end its ranks.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import warnings

_PR_SET_PDEATHSIG = 1


def _fork() -> int:
    with warnings.catch_warnings():
        # numpy has a thread, which stands still, and begins anew in the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(rank: int, folder: str) -> None:
    """Make this process what a launcher would have started."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.environ["RANK"] = str(rank)
    log = os.open(os.path.join(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _tell(numbers: list[int]) -> None:
    sys.stdout.write(f"{json.dumps(numbers)}\n")
    sys.stdout.flush()


def main() -> None:
    """Fork the ranks; each of them returns from here when its program has ended."""
    modules, world, folder, program, *words = sys.argv[1:]
    for name in modules.split(","):
        importlib.import_module(name)
    sys.argv = [program, *words]
    sys.path[0] = os.path.dirname(program)
    pids = []
    for rank in range(int(world)):
        pid = _fork()
        if pid == 0:
            _become(rank, folder)
            runpy.run_path(program, run_name="__main__")
            return
        pids.append(pid)
    _tell(pids)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    _tell(codes)


if __name__ == "__main__":
    main()
