# SPDX-License-Identifier: Apache-2.0
"""Run a command of the site for each bad node, so that the site drains or repairs it.

Reports are handled one after the other in a thread of their own: no restart waits for the command.
It gets one JSON object on its standard input, and is killed at its deadline. A failure is logged.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import threading
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import IO, Any

from nvidia_resiliency_ext.fault_tolerance._core.machine import Cause
from nvidia_resiliency_ext.shared_utils.children import start_child
from nvidia_resiliency_ext.shared_utils.clock import Clock, SystemClock
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError
from nvidia_resiliency_ext.shared_utils.event_loop import WorkerThread

logger = logging.getLogger("nvrx")

SCHEMA = "nvrx_bad_node.v1"
HOOK_DEADLINE_S = 30.0
SAME_NODE_PAUSE_S = 600.0
MOST_PER_HOUR = 20
HOUR_S = 3600.0
MAX_REPORT_BYTES = 64 << 10
MAX_END_BYTES = 300


def report_of(cause: Cause, *, job: str, reported_by: str, time: float) -> str:
    """Return a report as the command gets it, `time` in unix s; too large evidence is left out."""
    evidence = dict(cause.detail)
    for name in ("rank", "local_rank", "exit_code", "signal", "detected_by"):
        if (value := getattr(cause, name)) not in (None, ""):
            evidence.setdefault(name, value)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "node": cause.host,
        "reason": cause.kind,
        "what": cause.what,
        "job": job,
        "reported_by": reported_by,
        "time": time,
        "evidence": evidence,
    }
    text = json.dumps(document, default=str)
    if len(text) > MAX_REPORT_BYTES:
        text = json.dumps({**document, "evidence": {"dropped": "too large"}}, default=str)
    return text


@dataclass(eq=False)
class BadNodeHook:
    """Runs the command, if there is one, for each report that the limits allow; from any thread."""

    command: str | None
    environ: Mapping[str, str]
    _: KW_ONLY
    job: str
    host: str
    clock: Clock = field(default_factory=SystemClock)
    deadline_s: float = HOOK_DEADLINE_S

    def __post_init__(self) -> None:
        self._environ = dict(self.environ)
        self._argv = tuple(shlex.split(self.command or ""))
        # Nodes of the last hour and when it ran for each (monotonic s); guarded by _lock.
        self._runs: list[tuple[str, float]] = []
        self._is_closed = self.command is None  # guarded by _lock
        self._lock = threading.Lock()
        self._thread = WorkerThread("nvrx-bad-node-hook")

    def report(self, cause: Cause) -> None:
        """Run the command for a bad node if the limits allow; return at once, never raise."""
        wall, now = self.clock.wall(), self.clock.monotonic()
        with self._lock:
            if self._is_closed or not self._may_run(cause.host, now):
                return
            reports = [report_of(cause, job=self.job, reported_by=self.host, time=wall)]

            def job() -> None:
                for report in reports:
                    self._notify(cause, report)

            try:
                self._thread.submit(job, lambda _: None)
            except RuntimeError as error:
                reports.clear()  # the thread of a later report finds this job, too
                logger.warning("bad node %s is not reported: %s", cause.host, error)
            else:
                self._runs.append((cause.host, now))

    def _may_run(self, node: str, now: float) -> bool:
        self._runs = [(name, at) for name, at in self._runs if now - at < HOUR_S]
        is_known = any(name == node and now - at < SAME_NODE_PAUSE_S for name, at in self._runs)
        return not is_known and len(self._runs) < MOST_PER_HOUR

    def close(self) -> None:
        """Run the command for all pending reports, within one deadline of the command."""
        with self._lock:
            self._is_closed = True
        self._thread.close(self.deadline_s + 1.0)

    def _notify(self, cause: Cause, report: str) -> None:
        try:
            problem = self._run(report)
        except (ChildStartError, OSError) as error:
            problem = str(error)
        if problem:
            problem = " ".join(problem.split())
            logger.warning("--ft-bad-node-hook for %s: %s", cause.host, problem)
        else:
            logger.info("--ft-bad-node-hook was notified of %s: %s", cause.host, cause.what)

    def _run(self, report: str) -> str:
        """Run the command; return what went wrong, or an empty text."""
        # Files and not pipes: a command that reads or writes nothing, or all day, blocks nobody.
        import tempfile  # slow, and few jobs have a bad node

        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as said:
            stdin.write(report.encode())
            stdin.seek(0)
            child = start_child(
                self._argv,
                env=self._environ,
                stdin=stdin.fileno(),
                stdout=said.fileno(),
                stderr=said.fileno(),
                new_session=True,
                die_with_parent=True,
            )
            with child:
                status = child.wait(self.deadline_s)
                # Also what it left in its group.
                child.signal_group(signal.SIGKILL)
                if status is None:
                    return f"not done within {self.deadline_s:g} s: killed{_end_of(said)}"
                return "" if status.code == 0 else f"{status.describe()}{_end_of(said)}"


def _end_of(said: IO[bytes]) -> str:
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - MAX_END_BYTES))
    text = said.read().decode(errors="replace").strip()
    return f": {text}" if text else ""
