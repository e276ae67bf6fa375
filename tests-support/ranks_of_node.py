# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a job; torch is imported once for all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fork_server import ForkServer


class RanksOfNode:
    """Ranks that run; their output is in `rank<number>.log`."""

    def __init__(self, server: ForkServer, pids: list[int]) -> None:
        self._server = server
        #: Process numbers by rank; each is the leader of a session.
        self.pids = pids

    def are_running(self) -> bool:
        """Say whether one of them has not ended."""
        return any(self._server.is_running(pid) for pid in self.pids)

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Wait until all have ended; return their exit codes."""
        if timeout_s is None:
            return [self._server.wait(pid) for pid in self.pids]
        deadline = time.monotonic() + timeout_s
        return [self._server.wait(pid, deadline - time.monotonic()) for pid in self.pids]

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
    server = ForkServer(modules, environ)
    try:
        with started_by(server, folder, world, program, words, environ) as ranks:
            yield ranks
    finally:
        server.close()


@contextlib.contextmanager
def started_by(
    server: ForkServer,
    folder: Path,
    world: int,
    program: Path,
    words: Iterable[str],
    environ: Mapping[str, str],
) -> Iterator[RanksOfNode]:
    """Run a program as `world` ranks, forked by a server that goes on; kill those that are left."""
    ranks = RanksOfNode(server, [])
    command = [program, *words]
    try:
        for rank in range(world):
            with open(os.devnull) as nothing, (folder / f"rank{rank}.log").open("w") as log:
                streams = [nothing.fileno(), log.fileno(), log.fileno()]
                own = {**environ, "RANK": str(rank)}
                ranks.pids.append(server.start(command, streams, own))
        yield ranks
    finally:
        for pid in ranks.pids:
            server.kill(pid)
