# SPDX-License-Identifier: Apache-2.0
"""Import modules once, then fork a process for each program that is to be run.

Arguments: a socket, and the modules with commas. A request is JSON, with descriptors for input,
output and errors of the program. Each is answered with the process number; when the process has
ended, its number and exit code are sent. With this process end all that it forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import types
import warnings
from typing import Any

_PR_SET_PDEATHSIG = 1
_REQUEST_BYTES = 1 << 20


def _fork() -> int:
    with warnings.catch_warnings():
        # numpy has a thread, which stands still, and begins anew in the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Make this process what an interpreter would be that was started with the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    program, *words = request["command"]
    sys.argv = [program, *words]
    sys.path[:] = [os.path.dirname(program), *request["path"]]


def _run(program: str) -> None:
    """Run a file as `__main__`, whose names are there until the interpreter ends."""
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    main_module.__file__ = program
    with open(program, "rb") as file:
        code = compile(file.read(), program, "exec")
    exec(code, vars(main_module))  # noqa: S102 - as an interpreter does


def main() -> None:
    """Serve until the socket is closed; each child returns from here when its program has ended."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2].split(","):
        importlib.import_module(name)

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError, BrokenPipeError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                control.send(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())

    signal.signal(signal.SIGCHLD, reap)
    while True:
        data, streams, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 3)
        if not data:
            os._exit(0)  # the end of an interpreter with torch takes long
        request = json.loads(data)
        # An end is told of after the beginning.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = _fork()
        if pid == 0:
            control.close()
            _become(request, streams)
            _run(sys.argv[0])
            return
        for stream in streams:
            os.close(stream)
        control.send(json.dumps([pid, None]).encode())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


if __name__ == "__main__":
    main()
