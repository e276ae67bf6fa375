# SPDX-License-Identifier: Apache-2.0
"""Owns the thread that aggregates: when it works and when it waits; what it does is not its own."""

from __future__ import annotations

import logging
import os
import select
import threading

from nvidia_resiliency_ext.shared_utils.directory_notices import DirectoryNotices
from nvidia_resiliency_ext.shared_utils.event_loop import WakeUp

from .writer import Aggregation, Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


_GAP_S = 0.05
_RETRY_S = 1.0
_LOOK_S = 5.0
_LOOK_WITHOUT_NOTICES_S = 0.25
_log = logging.getLogger("nvrx")


class NodeLogAggregator:
    """Merges the files that the processes of a node log to into one file.

    A record with its lines stays in one piece. Each comes exactly once, also when the process is
    killed and another one goes on; after a power cut, what the file systems kept decides.

    Args:
        log_dir: Directory of the merged file; made when it is missing.
        temp_dir: Directory of the files, ``rank_*``; made with mode 0700 when it is missing.
        log_file: Name of the merged file.
        max_file_size: Bytes from which on a file is deleted once it is read and closed.
        en_chrono_ord: Merge the records of different files by their times; they come 0.3 s later.
    """

    def __init__(
        self, log_dir: str, temp_dir: str, log_file: str, max_file_size: int, en_chrono_ord: bool
    ) -> None:
        self._job = Job(
            temp_dir=os.path.abspath(temp_dir),
            log_dir=os.path.abspath(log_dir),
            log_file=log_file,
            max_file_size=max_file_size,
            is_ordered=bool(en_chrono_ord),
        )
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start_aggregator(self) -> None:
        """Start the thread; without effect when it runs.

        Raises:
            DirectoryBusyError: Another aggregator works in the directory.
            UnsafePathError: A directory or the merged file cannot be trusted.
            OSError: Something cannot be made or opened.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        aggregation = Aggregation(self._job, _log.warning)
        self._stop.clear()
        self._wake_up = WakeUp()
        self._thread = threading.Thread(
            target=self._run, args=(aggregation,), name="nvrx-log-aggregator", daemon=True
        )
        self._thread.start()

    def shutdown(self) -> None:
        """Merge everything that has been written so far, and end the thread.

        What cannot be merged, because the disk is full, stays in the files for the next start.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        if thread.is_alive():
            self._wake_up.set()
            thread.join()
        self._wake_up.close()

    def _run(self, aggregation: Aggregation) -> None:
        current: Aggregation | None = aggregation
        while current is not None:
            try:
                self._serve(current)
                _drain(current)
            finally:
                current.close()
            current = None if self._stop.is_set() else self._begin_again()

    def _serve(self, aggregation: Aggregation) -> None:
        """Work until the end is asked for or the directory is another one."""
        notices = DirectoryNotices(aggregation.directory)
        look_s = _LOOK_S if notices.are_there else _LOOK_WITHOUT_NOTICES_S
        names: Iterable[str] | None = None
        try:
            while not self._stop.is_set() and not (names is None and aggregation.is_moved()):
                step = aggregation.step(names)
                if step.again_s == 0.0:
                    names = ()
                    continue
                # What comes in a short time is merged together: it costs one look.
                self._wait(None, _RETRY_S if step.is_blocked else _GAP_S)
                is_waiting = step.again_s is not None
                if self._wait(notices, look_s if step.again_s is None else step.again_s - _GAP_S):
                    names = notices.names()
                else:
                    names = () if is_waiting and notices.are_there else None
        finally:
            notices.close()

    def _wait(self, notices: DirectoryNotices | None, seconds: float) -> bool:
        """Wait for notices, the end or the time; say whether notices came."""
        poll = select.poll()
        poll.register(self._wake_up, select.POLLIN)
        if notices is not None and notices.are_there:
            poll.register(notices.fileno(), select.POLLIN)
        return any(fd != self._wake_up.fileno() for fd, _ in poll.poll(max(0.0, seconds) * 1000))

    def _begin_again(self) -> Aggregation | None:
        """Return an aggregation of the directory that stands under the path now."""
        is_logged = False
        while not self._stop.is_set():
            try:
                return Aggregation(self._job, _log.warning)
            except (OSError, RuntimeError) as error:
                if not is_logged:
                    _log.warning("aggregation of %s waits: %s", self._job.temp_dir, error)
                is_logged = True
            self._wait(None, _RETRY_S)
        return None


def _drain(aggregation: Aggregation) -> None:
    """Merge what is there; give up where it cannot be merged now."""
    step = aggregation.step(None, is_final=True)
    while step.taken or step.again_s == 0.0:
        step = aggregation.step((), is_final=True)
