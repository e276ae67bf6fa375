# SPDX-License-Identifier: Apache-2.0
"""Earlier attempts of a job: records, their file, and how often the same fault came back."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution._core.errors import UnreadableInputError
from nvidia_resiliency_ext.attribution._core.files import LOCK_FLAGS
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, lock_file, read_regular_file

if TYPE_CHECKING:
    from nvidia_resiliency_ext.attribution._core.verdict import Verdict

__all__ = [
    "Attempt",
    "Repeats",
    "attempt_of",
    "count_repeats",
    "keep_verdict",
    "load_history",
    "save_attempt",
]

logger = logging.getLogger("nvrx")

_PER_JOB = 10
_TOTAL = 3000
_LIMIT_BYTES = 32 << 20
_SQLITE_ENDINGS = (".db", ".sqlite", ".sqlite3")
_SQLITE_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """Record of one attempt in the history.

    Attributes:
        job_id: The job; None: not said.
        cycle_id: Which attempt of it; None: in the order of the records.
        fingerprint: Of its first fault.
        entity: File or place in the data, or None.
        rank: Who had the fault, or None.
        node: Where, or None.
        step: Last completed step; -1: none.
        checkpoint: Last saved checkpoint; -1: none.
        is_readable: False for a log that was cut or could not be read: its progress is unknown.
        attempt_index: How often the scheduler had requeued the job; its cycles begin anew.
    """

    job_id: str | None
    cycle_id: int | None
    fingerprint: str
    entity: str | None = None
    rank: int | None = None
    node: str | None = None
    step: int = -1
    checkpoint: int = -1
    is_readable: bool = True
    attempt_index: int = 0


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often the same fault preceded this one, without progress between.

    Attributes:
        root: Attempts with the same fault.
        entity: Those with the same file or data, too.
        on_node: Those on the same node, too.
        had_steps: Some earlier attempt completed a step.
    """

    root: int = 0
    entity: int = 0
    on_node: int = 0
    had_steps: bool = False


def attempt_of(verdict: Verdict | Mapping[str, Any]) -> Attempt:
    """Return the attempt to keep in the history, from a verdict or its JSON object."""
    value = verdict if isinstance(verdict, Mapping) else verdict.to_dict()
    if "step" in value and "fingerprint" in value:
        return Attempt(**{key: value[key] for key in Attempt.__slots__ if key in value})
    fault = value.get("first_fault") or {}
    progress = value.get("progress") or {}
    coverage = value.get("coverage") or {}
    return Attempt(
        *(value.get("job_id"), value.get("cycle_id"), str(value.get("fingerprint", ""))),
        *((value.get("entity") or {}).get("id"), fault.get("rank"), fault.get("node")),
        *(_step(progress.get("last_step")), _step(progress.get("last_checkpoint_step"))),
        is_readable=value.get("action") != "UNKNOWN" and not coverage.get("truncated", False),
    )


def count_repeats(now: Attempt, earlier: Sequence[Attempt]) -> Repeats:
    """Count the attempts just before this one that had the same fault and got no further.

    Args:
        now: This attempt.
        earlier: Others of the job, oldest first.
    """
    root = entity = on_node = 0
    newer = now
    same_entity = same_node = True
    for attempt in reversed(earlier):
        if not attempt.is_readable:
            continue  # neither counts nor resets
        if attempt.fingerprint != now.fingerprint:
            break
        if newer.step > attempt.step or newer.checkpoint > attempt.checkpoint:
            break
        root += 1
        same_entity = same_entity and attempt.entity == now.entity
        same_node = same_node and now.node is not None and attempt.node == now.node
        entity += same_entity
        on_node += same_node
        newer = attempt
    had_steps = any(attempt.step >= 0 for attempt in earlier)
    return Repeats(root, entity, on_node, had_steps)


def load_history(
    history: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | None,
    job_id: str | None,
    cycle_id: int | None,
    attempt_index: int = 0,
) -> list[Attempt]:
    """Return the earlier attempts of a job, oldest first.

    Args:
        history: A JSON-lines or SQLite file, earlier verdicts, or None. A file need not exist.
        job_id: Whose attempts.
        cycle_id: This attempt: it and later ones are left out; None: all are earlier.
        attempt_index: How often the job was requeued before this attempt.

    Raises:
        UnreadableInputError: The file is no history.
    """
    if history is None:
        return []
    if isinstance(history, str | os.PathLike):
        attempts = _attempts(_rows(os.fspath(history)))
        attempts = [attempt for attempt in attempts if attempt.job_id == job_id]
    else:
        attempts = [attempt_of(value) for value in history]
    if cycle_id is not None:
        now = (attempt_index, cycle_id)
        attempts = [a for a in attempts if a.cycle_id is None or _order(a) < now]
        attempts.sort(key=_order)
    return attempts


def _order(attempt: Attempt) -> tuple[int, int]:
    return attempt.attempt_index, -1 if attempt.cycle_id is None else attempt.cycle_id


def keep_verdict(path: str, verdict: Verdict, attempt_index: int) -> None:
    """Add the attempt of a verdict to a file; one that takes no more costs a warning alone.

    Args:
        path: JSON lines, or SQLite.
        verdict: What was found.
        attempt_index: How often the job was requeued before.
    """
    try:
        save_attempt(path, replace(attempt_of(verdict), attempt_index=attempt_index))
    except OSError as error:
        logger.warning("this attempt is not added to the history %s: %s", path, error)


def save_attempt(path: str, attempt: Attempt, timeout_s: float = _LOCK_TIMEOUT_S) -> None:
    """Add an attempt to a file; the same attempt again replaces itself.

    At most 10 attempts per job and 3000 in all are kept, the newest. Programs that add at the same
    time take turns, by a lock on `<path>.lock`.

    Args:
        path: JSON lines, or SQLite.
        attempt: What to add.
        timeout_s: Seconds to wait for a turn.

    Raises:
        OSError: The file cannot be written, or another program keeps the lock.
    """
    with _locked(f"{path}.lock", timeout_s):
        _save(path, attempt)


@contextlib.contextmanager
def _locked(path: str, timeout_s: float) -> Iterator[None]:
    descriptor = os.open(path, LOCK_FLAGS, 0o600)
    try:
        try:
            lock_file(descriptor, timeout_s)
        except BlockingIOError as error:
            raise OSError(error.errno, error.strerror, path) from None
        yield
    finally:
        os.close(descriptor)


def _save(path: str, attempt: Attempt) -> None:
    rows = _rows(path)
    if any('"log_path"' in row for row in rows):
        raise OSError(errno.EPERM, "it is the history of a service, which alone writes it", path)
    kept = [
        other
        for other in _attempts(rows)
        if attempt.cycle_id is None
        or (other.job_id, _order(other)) != (attempt.job_id, _order(attempt))
    ]
    kept.append(attempt)
    of_job = [other for other in kept if other.job_id == attempt.job_id]
    dropped = {id(other) for other in of_job[:-_PER_JOB]}
    kept = [other for other in kept if id(other) not in dropped][-_TOTAL:]
    if path.endswith(_SQLITE_ENDINGS):
        try:
            _write_sqlite(path, kept)
        except sqlite3.Error as error:
            raise OSError(errno.EIO, str(error), path) from None
    else:
        lines = "".join(json.dumps(asdict(other)) + "\n" for other in kept)
        atomic_write(path, lines.encode())


def _rows(path: str) -> list[str]:
    if not os.path.exists(path):
        return []
    try:
        if path.endswith(_SQLITE_ENDINGS):
            return _read_sqlite(path)
        return read_regular_file(path, _LIMIT_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, sqlite3.Error) as error:
        text = f"not a history: {error}; move it away to begin another"
        raise UnreadableInputError(path, text) from None


def _attempts(rows: list[str]) -> list[Attempt]:
    found = []
    for row in rows:
        # A half-written last line costs that line alone.
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            value = json.loads(row)
            if isinstance(value, dict):
                found.append(attempt_of(value))
    return found


def _read_sqlite(path: str) -> list[str]:
    with contextlib.closing(sqlite3.connect(path, timeout=_SQLITE_TIMEOUT_S)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'attempts'").fetchone():
            return []  # left by a program that was killed before it wrote
        return [row[0] for row in database.execute("SELECT record FROM attempts ORDER BY id")]


def _write_sqlite(path: str, attempts: list[Attempt]) -> None:
    rows = [(json.dumps(asdict(attempt)),) for attempt in attempts]
    connection = sqlite3.connect(path, timeout=_SQLITE_TIMEOUT_S)
    with contextlib.closing(connection), connection as database:
        database.execute(
            "CREATE TABLE IF NOT EXISTS attempts (id INTEGER PRIMARY KEY, record TEXT)"
        )
        database.execute("DELETE FROM attempts")
        database.executemany("INSERT INTO attempts (record) VALUES (?)", rows)


def _step(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
