# SPDX-License-Identifier: Apache-2.0
"""`--event-log-handler`: what torch's handlers are told, beside what torchrun tells them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic import events
from torch.distributed.elastic.events import handlers

from nvidia_resiliency_ext.fault_tolerance._core.machine import Assignment
from nvidia_resiliency_ext.fault_tolerance._report.failures import ErrorFile, Failure
from nvidia_resiliency_ext.fault_tolerance._report.torch_events import (
    TorchEvents,
    check_handler,
)
from nvidia_resiliency_ext.shared_utils.children import ExitStatus
from nvidia_resiliency_ext.shared_utils.clock import SystemClock

NAME = "of-this-test"
ASSIGNMENT = Assignment(
    cycle=2,
    group_rank=1,
    group_world_size=3,
    rank_offset=2,
    world_size=6,
    master_addr="h",
    master_port=1,
)


class Kept(logging.Handler):
    """A handler that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one event."""
        self.events.append(json.loads(record.getMessage()))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """Register a handler with torch."""
    handler = Kept()
    monkeypatch.setitem(handlers._log_handlers, NAME, handler)
    yield handler
    logger = events._events_loggers.pop(NAME, None)
    if logger is not None:
        logger.removeHandler(handler)


def failure(local_rank: int) -> Failure:
    """Return the failure of a worker that left an error file."""
    error = ErrorFile("/e", "it fell", "", None)
    return Failure(
        rank=2 + local_rank,
        local_rank=local_rank,
        pid=101 + local_rank,
        host="h",
        status=ExitStatus(code=3, signal=None),
        seen_at=1.0,
        error=error,
        hang={},
    )


def reported(
    kept: Kept, exit_code: int, failures: list[Failure], stop_signal: int | None
) -> list[Any]:
    """Return source, state and rank of what is told of a job of two workers."""
    one = TorchEvents(NAME, SystemClock(), run_id="job", role="default", entry="train.py")
    one.started(ASSIGNMENT, {0: 101, 1: 102})
    one.ended(exit_code, failures, stop_signal)
    one.close()
    return [
        (event["source"], event["metadata"]["state"], event["metadata"]["global_rank"])
        for event in kept.events
    ]


STARTS = [("WORKER", "START", 2), ("WORKER", "START", 3)]


def test_a_job_that_succeeds(kept: Kept) -> None:
    """Starts, successes of the workers, success of the launcher; in torch's words."""
    ends = [("WORKER", "SUCCEEDED", 2), ("WORKER", "SUCCEEDED", 3), ("AGENT", "SUCCEEDED", None)]
    assert reported(kept, 0, [], None) == STARTS + ends
    first = kept.events[0]
    assert first["name"] == "torchelastic.worker.status.START"
    about = json.loads(first["metadata"].pop("metadata"))
    assert about == {
        "group_world_size": 3,
        "entry_point": "train.py",
        "local_rank": [0],
        "role_rank": [2],
        "role_world_size": [6],
        "exit_code": [None],
        "worker_pid": [None],
    }
    assert (first["metadata"]["agent_restarts"], first["metadata"]["worker_id"]) == (2, "101")


def test_a_job_that_fails(kept: Kept) -> None:
    """The worker that failed, with code and error; the other, which was ended; the launcher."""
    ends = [("WORKER", "TERMINATED", 2), ("WORKER", "FAILED", 3), ("AGENT", "SUCCEEDED", None)]
    assert reported(kept, 1, [failure(1)], None) == STARTS + ends
    failed = kept.events[3]["metadata"]
    assert json.loads(failed["raw_error"]) == {"message": "it fell"}
    about = json.loads(failed["metadata"])
    assert (about["exit_code"], about["worker_pid"]) == ([3], [102])


@pytest.mark.parametrize(("exit_code", "stop_signal"), [(1, 15), (0, 15), (1, None)])
def test_a_job_that_was_ended(kept: Kept, exit_code: int, stop_signal: int | None) -> None:
    """After a signal, or for a reason that no worker gave, the launcher has failed."""
    assert reported(kept, exit_code, [], stop_signal) == [*STARTS, ("AGENT", "FAILED", None)]


def test_a_spare_says_no_more_than_how_it_ended(kept: Kept) -> None:
    """A node without workers has no worker events."""
    one = TorchEvents(NAME, SystemClock(), run_id="job", role="default", entry="train.py")
    one.ended(0, [], None)
    one.close()
    assert [event["metadata"]["state"] for event in kept.events] == ["SUCCEEDED"]


def test_a_handler_that_fails_is_one_warning(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told nothing more, and the job does not notice."""

    def refuse(*_: object) -> None:
        raise RuntimeError("full")

    monkeypatch.setattr(events, "record", refuse)
    assert reported(kept, 0, [], None) == []
    assert caplog.text.count("is told nothing more: RuntimeError: full") == 1


def test_names_that_torch_does_not_know_are_refused(kept: Kept) -> None:
    """What a site has registered with torch is taken, as are torch's own."""
    assert kept.events == []
    for name in (NAME, "null", "console", "dynamic_rendezvous"):
        check_handler(name)
    with pytest.raises(ValueError, match="--event-log-handler other: torch knows no handler"):
        check_handler("other")


def start(module: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a launcher that tells the handler `console`."""
    script = folder / "train.py"
    script.write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", module, "--nproc-per-node=2", "--event-log-handler=console"),
            *(*words, str(script)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO"},
    )


def told(launcher: subprocess.Popen[str]) -> list[tuple[str, str, Any, Any]]:
    """Return what a launcher told until its end, in an order of its own."""
    try:
        _, said = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 1, said
    found = []
    for line in said.splitlines():
        if '"torchelastic.worker.status.' not in line:
            continue
        event = json.loads(line)
        about = json.loads(event["metadata"]["metadata"])
        keys = (sorted(event["metadata"]), sorted(about))
        state = event["metadata"]["state"]
        # How long torchrun's own steps take is not told here.
        if state in {"START", "SUCCEEDED", "FAILED", "TERMINATED"}:
            exits = about.get("exit_code")
            found.append((event["source"], state, exits, keys))
    return sorted(found, key=str)


@pytest.mark.serial
def test_torchrun_tells_the_same(tmp_path: Path) -> None:
    """Of a job whose second worker fails, both launchers tell the same events."""
    launcher = start("nvidia_resiliency_ext.fault_tolerance.launcher", tmp_path, "--ft-prewarm=off")
    torchs = start("torch.distributed.run", tmp_path, "--standalone", "--monitor-interval=0.1")
    try:
        ours = told(launcher)
    finally:
        theirs = told(torchs)
    assert len(ours) == 5
    # The first worker may have left before it was ended: who of the two tells, decides.
    assert [state.replace("TERMINATED", "SUCCEEDED") for _, state, _, _ in ours] == [
        state.replace("TERMINATED", "SUCCEEDED") for _, state, _, _ in theirs
    ]
    assert [(source, keys) for source, _, _, keys in ours] == [
        (source, keys) for source, _, _, keys in theirs
    ]
