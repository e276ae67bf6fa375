# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a job; torch is imported once for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_PROGRAM = Path(__file__).with_name("fork_ranks.py")


class RanksOfNode:
    """Ranks that run; their output is in `rank<number>.log`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self._lines = process.stdout
        #: Process numbers by rank; each is the leader of a session.
        self.pids: list[int] = json.loads(self._lines.readline() or "[]")

    def are_running(self) -> bool:
        """Say whether one of them has not ended."""
        return self._process.poll() is None

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Wait until all have ended; return their exit codes."""
        code = self._process.wait(timeout_s)
        assert code == 0, f"what forks the ranks has ended with {code}"
        codes: list[int] = json.loads(self._lines.readline())
        return codes

    def abort(self) -> None:
        """Abort the ranks that still run and what is in their sessions."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGABRT)


@contextlib.contextmanager
def started(
    folder: Path,
    world: int,
    program: Path,
    words: Iterable[str],
    environ: Mapping[str, str],
    modules: Iterable[str] = ("torch.distributed",),
) -> Iterator[RanksOfNode]:
    """Run a program as `world` ranks; kill those that are left at the end.

    Args:
        folder: Where their logs go.
        world: How many ranks.
        program: What they run.
        words: Its arguments.
        environ: Their environment, to which `RANK` is added.
        modules: What is imported before there are ranks.
    """
    command = [sys.executable, str(_PROGRAM), ",".join(modules), str(world), str(folder)]
    with subprocess.Popen(
        [*command, str(program), *words], env=dict(environ), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield RanksOfNode(process)
        finally:
            process.kill()
