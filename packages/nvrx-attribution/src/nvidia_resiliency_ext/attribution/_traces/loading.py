# SPDX-License-Identifier: Apache-2.0
"""Find the dumps of a job and read them, many at a time; a bad file becomes a finding.

Files are read by worker processes with limited memory and CPU time, which answer with plain JSON in
a memory file: what a hostile file does to its reader costs that file alone.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution._core.errors import NoTraceError
from nvidia_resiliency_ext.attribution._traces.dumps import Dump
from nvidia_resiliency_ext.attribution._traces.reading import DumpReader
from nvidia_resiliency_ext.shared_utils.children import start_child
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError, PathOutsideRootsError
from nvidia_resiliency_ext.shared_utils.os_utils import resolve_under_allowed_roots

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "DEFAULT_PATTERN",
    "FILE_LIMIT_BYTES",
    "Finding",
    "LoadedTraces",
    "collector_paused",
    "find_dump_files",
    "load_traces",
]

DEFAULT_PATTERN = "_dump_*"
FILE_LIMIT_BYTES = 256 << 20
# What readers may hand over of all files: some 200 bytes an entry, which take six times that here.
TOTAL_LIMIT_BYTES = 512 << 20
_FILE_LIMIT = 65_536
_BYTES_PER_WORKER = 3 << 20
_MOST_WORKERS = 8
_LOAD_TIMEOUT_S = 300.0
_CPU_S_PER_FILE = 60.0
_LOOK_S = 0.05
_READ_BYTES = 1 << 20
# The worker finds this package where its caller does, whatever the environment says.
_WORKER = (
    "import sys; sys.path[:] = sys.argv[1:];"
    " from nvidia_resiliency_ext.attribution._traces.reading import main; main()"
)
_collector_lock = threading.Lock()  # guards the next two
_pauses = 0
_was_enabled = False
_RANK = re.compile(r"(\d{1,7})(?:\.(?:json|pkl|pickle))?$")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about one file, or about the whole, that is worth saying.

    Attributes:
        kind: Such as `unsafe_pickle`, `unreadable`, `no_rank`, `duplicate`, `entries_dropped`.
        file: Name of the file; empty for the whole.
        text: What was found.
    """

    kind: str
    file: str
    text: str

    def to_dict(self) -> dict[str, str]:
        """Return the JSON object of a report."""
        return {"kind": self.kind, "file": self.file, "text": self.text}


@dataclass(slots=True)
class LoadedTraces:
    """All dumps that could be read, by rank, and what was found on the way."""

    dumps: dict[int, Dump] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector of cycles: it takes half the time where millions of objects live.

    Pauses of several threads may overlap: the last one to end enables it again.
    """
    global _pauses, _was_enabled  # noqa: PLW0603 - there is one collector
    with _collector_lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _collector_lock:
            _pauses -= 1
            if not _pauses and _was_enabled:
                gc.enable()


def find_dump_files(path: str, pattern: str = DEFAULT_PATTERN) -> list[str]:
    """Return the files of a directory, a prefix, or the one file given; sorted, not opened."""
    path = os.fspath(path)
    if os.path.isdir(path):
        found = glob.glob(os.path.join(glob.escape(path), pattern))
        if not found:
            found = [
                entry.path
                for entry in os.scandir(path)
                if _RANK.search(entry.name) and entry.is_file()
            ]
    elif os.path.isfile(path):
        found = [path]
    else:
        found = glob.glob(glob.escape(path) + "*")
    return sorted(file for file in found if os.path.isfile(file))[:_FILE_LIMIT]


@collector_paused()
def load_traces(
    path: str,
    pattern: str = DEFAULT_PATTERN,
    *,
    rank_regex: str | None = None,
    file_limit_bytes: int = FILE_LIMIT_BYTES,
    allowed_root: str | None = None,
    total_limit_bytes: int = TOTAL_LIMIT_BYTES,
) -> LoadedTraces:
    """Read every dump of a job.

    Args:
        path: Directory, prefix or single file.
        pattern: Which files of a directory.
        rank_regex: Finds the rank in a file's name, as its first group; default: the digits at
            the end of the name.
        file_limit_bytes: Larger files are findings and are not read.
        allowed_root: What leads outside of this directory is not read; None: no limit.
        total_limit_bytes: What all files together may hold, as JSON without what ranks repeat.

    Raises:
        NoTraceError: There is no such file, none of them is a dump, or they hold too much.
    """
    if allowed_root is not None:
        try:
            resolve_under_allowed_roots(path, [allowed_root])
        except PathOutsideRootsError:
            raise NoTraceError(path, f"lies outside of {allowed_root}") from None
    files = find_dump_files(path, pattern)
    if not files:
        raise NoTraceError(path, f"no dump of the flight recorder is there ({pattern})")
    loaded = LoadedTraces()
    jobs = _jobs(files, rank_regex, file_limit_bytes, loaded.findings)
    budget = _MemoryBudget(path, total_limit_bytes)
    for result in _read_by_workers(jobs, file_limit_bytes, allowed_root, budget):
        if isinstance(result, Finding):
            loaded.findings.append(result)
            continue
        loaded.dumps[result.rank] = result
        if result.dropped_entries:
            text = f"{result.dropped_entries} older entries were not read"
            loaded.findings.append(Finding("entries_dropped", result.file, text))
    if not loaded.dumps:
        reasons = "; ".join(f"{finding.file}: {finding.text}" for finding in loaded.findings[:3])
        raise NoTraceError(path, f"none of {len(files)} files is a readable dump ({reasons})")
    return loaded


def _jobs(
    files: Sequence[str], rank_regex: str | None, limit_bytes: int, findings: list[Finding]
) -> list[tuple[str, int]]:
    """Return (file, rank) once per rank; the newest file of a rank counts."""
    try:
        expression = _RANK if rank_regex is None else re.compile(rank_regex)
    except re.error as error:
        raise NoTraceError(rank_regex or "", f"not a regular expression: {error}") from None
    by_rank: dict[int, str] = {}
    for file in files:
        name = os.path.basename(file)
        match = expression.search(name)
        digits = match[match.re.groups and 1] if match is not None else ""
        if not digits or not digits.isdigit():
            findings.append(Finding("no_rank", name, "its name holds no rank"))
            continue
        if os.path.getsize(file) > limit_bytes:
            findings.append(Finding("too_large", name, f"larger than {limit_bytes} bytes"))
            continue
        rank = int(digits)
        earlier = by_rank.get(rank)
        if earlier is not None:
            older, file = sorted((earlier, file), key=os.path.getmtime)  # noqa: PLW2901
            text = f"rank {rank} has a newer dump, {os.path.basename(file)}"
            findings.append(Finding("duplicate", os.path.basename(older), text))
        by_rank[rank] = file
    return [(file, rank) for rank, file in sorted(by_rank.items())]


def _read_by_workers(
    jobs: list[tuple[str, int]], limit_bytes: int, allowed_root: str | None, budget: _MemoryBudget
) -> Iterable[Dump | Finding]:
    total_bytes = sum(os.path.getsize(file) for file, _ in jobs)
    enough = 1 + total_bytes // _BYTES_PER_WORKER
    count = min(_MOST_WORKERS, len(os.sched_getaffinity(0)), len(jobs), enough)
    deadline = Deadline.after(_LOAD_TIMEOUT_S)
    orders = {"limit_bytes": limit_bytes, "allowed_root": allowed_root, "cpu_s": _CPU_S_PER_FILE}
    orders["total_bytes"] = budget.limit_bytes
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(_Worker(jobs[at::count], orders, budget)) for at in range(count)
        ]
        # What one has read is taken over while the others read.
        while workers:
            for worker in workers:
                yield from worker.answers(_LOOK_S / len(workers), deadline)
            workers = [worker for worker in workers if worker.has_work]


class _MemoryBudget:
    """The bytes that all readers together may hand over.

    Args:
        path: The dumps.
        limit_bytes: As much in all.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._path = path
        self.limit_bytes = limit_bytes
        self.workers: list[_Worker] = []

    def check(self) -> None:
        """Compare the bytes that all readers have written, read or not, with the limit.

        Raises:
            NoTraceError: It is too much.
        """
        if sum(worker.written_bytes for worker in self.workers) > self.limit_bytes:
            raise NoTraceError(
                self._path,
                f"its dumps hold more than {self.limit_bytes} bytes of entries together, as many"
                " as are read at once; choose some of the files, or dump unfinished entries only",
            )


class _Worker:
    """One process that reads its share of the files into a memory file.

    Args:
        jobs: Files and ranks.
        orders: What holds for all workers.
        budget: The bytes that they may hand over.

    Raises:
        NoTraceError: No process can be started.
    """

    def __init__(
        self, jobs: list[tuple[str, int]], orders: dict[str, Any], budget: _MemoryBudget
    ) -> None:
        self._left = jobs
        self._orders = orders
        self._budget = budget
        self._earlier_bytes = 0
        self._start()
        budget.workers.append(self)

    def _start(self) -> None:
        self._is_ready = False
        self._offset = 0
        self._rest: list[bytes] = []
        self._reader = DumpReader()
        paths = [os.path.abspath(path) for path in sys.path]
        with contextlib.ExitStack() as stack:
            self._answers = _memory_file(stack, "nvrx-dumps")
            orders = _memory_file(stack, "nvrx-orders")
            with open(os.dup(orders), "wb") as file:
                file.write(json.dumps({**self._orders, "jobs": self._left}).encode())
            os.lseek(orders, 0, os.SEEK_SET)
            try:
                self._child = start_child(
                    [sys.executable, "-E", "-c", _WORKER, *paths],
                    stdin=orders,
                    stdout=self._answers,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                )
            except ChildStartError as error:
                raise NoTraceError(self._left[0][0], f"no reader can be started: {error}") from None
            os.close(orders)
            stack.pop_all()

    @property
    def has_work(self) -> bool:
        """Whether files are left without a result."""
        return bool(self._left)

    @property
    def written_bytes(self) -> int:
        """The bytes that this worker's processes have written so far."""
        return self._earlier_bytes + os.fstat(self._answers).st_size

    def answers(self, wait_s: float, deadline: Deadline) -> Iterator[Dump | Finding]:
        """Yield a dump or a finding for each file that was answered for since the last call.

        Args:
            wait_s: Seconds to wait for the end of the process before.
            deadline: When the process is over time.

        Raises:
            NoTraceError: The process ends before it reads anything, or all hand over too much.
        """
        status = self._child.wait(min(wait_s, deadline.remaining()))
        is_late = status is None and deadline.expired()
        # Only then: what it wrote before its end is all there.
        for line in self._new_lines():
            if not self._is_ready:
                self._is_ready = True
                continue
            file, _ = self._left.pop(0)
            yield _answer(self._reader, json.loads(line), os.path.basename(file))
        if is_late:
            for file, _ in self._left:
                yield Finding("unreadable", os.path.basename(file), "its reader is over time")
            self._left = []
        if not self._left or status is None:
            return
        how = status.describe()
        if not self._is_ready:
            raise NoTraceError(self._left[0][0], f"its reader does not start: {how}")
        # The first file without an answer is the one at which the process ended.
        file, _ = self._left.pop(0)
        if status.signal == signal.SIGPROF:
            how = f"needs over {self._orders['cpu_s']:g} s of CPU time"
        yield Finding("unreadable", os.path.basename(file), f"its reader {how}")
        if self._left:
            self._earlier_bytes = self.written_bytes
            self.close()
            self._start()

    def _new_lines(self) -> Iterator[bytes]:
        # The process shares the position of the file: it must not be moved.
        while True:
            self._budget.check()
            data = os.pread(self._answers, _READ_BYTES, self._offset)
            if not data:
                return
            self._offset += len(data)
            *lines, rest = data.split(b"\n")
            if lines:
                lines[0] = b"".join((*self._rest, lines[0]))
                self._rest = []
            self._rest.append(rest)
            yield from lines

    def close(self) -> None:
        """Kill the process if it still runs, and give the descriptor back."""
        self._child.close()
        if self._answers >= 0:
            os.close(self._answers)
        self._answers = -1

    def __enter__(self) -> _Worker:  # noqa: PYI034 - Self came with Python 3.11
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the worker."""
        self.close()


def _memory_file(stack: contextlib.ExitStack, name: str) -> int:
    descriptor = os.memfd_create(name)
    stack.callback(os.close, descriptor)
    return descriptor


def _answer(reader: DumpReader, answer: dict[str, Any], file: str) -> Dump | Finding:
    if "finding" in answer:
        return Finding(answer["finding"], file, answer["text"])
    return reader.dump(answer)
