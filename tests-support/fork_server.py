# SPDX-License-Identifier: Apache-2.0
"""Programs that need torch, run in processes forked from one that has imported it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

_MAIN = Path(__file__).with_name("fork_server_main.py")


class ForkedProgram:
    """A program that runs; `output` is what it writes, `errors` what it says beside that."""

    def __init__(self, server: ForkServer, pid: int, streams: list[IO[str]]) -> None:
        self.pid = pid
        self.input, self.output, self.errors = streams
        self._server = server

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end, and return its exit code."""
        return self._server.wait(self.pid, timeout_s)

    def kill(self) -> None:
        """Kill it, if it runs."""
        self._server.kill(self.pid)


class ForkServer:
    """A process that has imported modules, and forks one for each program that is run.

    Args:
        modules: What is imported once.
        environ: The environment in which it is imported.
    """

    def __init__(self, modules: Iterable[str], environ: Mapping[str, str] = os.environ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(_MAIN), str(theirs.fileno()), ",".join(modules)]
        self._process = subprocess.Popen(
            command,
            env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._codes: dict[int, int | None] = {}

    def start(
        self,
        command: Iterable[object],
        streams: Iterable[int],
        environ: Mapping[str, str] = os.environ,
    ) -> int:
        """Run a program, and return its process number; it is the leader of a session.

        Args:
            command: The program's file and its arguments.
            streams: Its input, output and errors.
            environ: Its environment.
        """
        request = {
            "command": [str(word) for word in command],
            "environ": dict(environ),
            "folder": os.getcwd(),
            "path": sys.path,
        }
        socket.send_fds(self._control, [json.dumps(request).encode()], list(streams))
        while True:
            pid, code = self._receive()
            if code is None:
                return pid

    @contextlib.contextmanager
    def running(
        self, *command: object, environ: Mapping[str, str] = os.environ
    ) -> Iterator[ForkedProgram]:
        """Run a program with pipes to it; kill it at the end, if it still runs.

        Args:
            command: The program's file and its arguments.
            environ: Its environment.
        """
        with contextlib.ExitStack() as stack:
            theirs: list[int] = []
            ours: list[IO[str]] = []
            for number in range(3):
                ends = os.pipe()
                mine, its = ends if number else ends[::-1]
                ours.append(stack.enter_context(open(mine, "r" if number else "w")))
                theirs.append(its)
            pid = self.start(command, theirs, environ)
            for descriptor in theirs:
                os.close(descriptor)
            program = ForkedProgram(self, pid, ours)
            try:
                yield program
            finally:
                program.kill()
                program.wait()

    def is_running(self, pid: int) -> bool:
        """Say whether a program's end has not been told of."""
        while select.select([self._control], [], [], 0)[0]:
            self._receive()
        return self._codes[pid] is None

    def wait(self, pid: int, timeout_s: float | None = None) -> int:
        """Wait for the end of a program, and return its exit code."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self._codes.get(pid)) is None:
            if deadline is not None:
                self._control.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._receive()
            finally:
                self._control.settimeout(None)
        return code

    def kill(self, pid: int) -> None:
        """Kill a program, if it runs."""
        if self.is_running(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and all that it forked."""
        self._control.close()
        self._process.wait()

    def _receive(self) -> tuple[int, int | None]:
        data = self._control.recv(1000)
        assert data, "what forks programs has ended"
        pid, code = json.loads(data)
        self._codes[pid] = code
        return pid, code
