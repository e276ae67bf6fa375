# SPDX-License-Identifier: Apache-2.0
"""The monitor's log files and pid files; both are ours alone and follow no symbolic link."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig, setup_logger
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write, read_regular_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

__all__ = ["Journal"]

_FORMAT = "%(asctime)s [%(levelname)s] %(message)s"
_PID_BYTES = 32
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Journal:
    """What the monitor says, and where it says that it lives.

    Without a log file, and without a directory for node-local logs, it is silent. A file that
    cannot be written costs its lines and nothing else.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Configure the logger "nvrx" of this program."""
        self._logger = logging.getLogger(LogConfig.name)
        self._handlers: dict[str, logging.StreamHandler[TextIO]] = {}
        self._pid_files: set[str] = set()
        if environ.get("NVRX_NODE_LOCAL_TMPDIR"):
            with contextlib.suppress(OSError):
                setup_logger(node_local_tmp_prefix="monproc")
        if not self._logger.handlers:
            self._logger.addHandler(logging.NullHandler())
        self._logger.setLevel(LogConfig.get_log_level(environ))
        self._logger.propagate = False

    def open_log(self, path: str, initial_rank: int) -> None:
        """Write a rank's lines to a file, too; it is emptied when this monitor first opens it."""
        path = path.replace("{rank}", str(initial_rank))
        if not path or path in self._handlers:
            return
        try:
            stream: TextIO = os.fdopen(_open_regular(path), "w", errors="backslashreplace")
        except OSError as error:
            self._logger.warning("monitor_process: the log file %s cannot be used: %s", path, error)
            return
        self._handlers[path] = handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter(_FORMAT))
        self._logger.addHandler(handler)

    def write_pid(self, path: str, initial_rank: int) -> None:
        """Write our number to a rank's pid file."""
        path = path.replace("{rank}", str(initial_rank))
        if not path:
            return
        try:
            atomic_write(path, str(os.getpid()).encode(), fsync=False)
        except OSError as error:
            self._logger.warning("monitor_process: no pid file %s: %s", path, error)
            return
        self._pid_files.add(path)

    def close(self) -> None:
        """Remove the pid files that still name us, and close the log files."""
        for path in self._pid_files:
            with contextlib.suppress(OSError):
                if read_regular_file(path, _PID_BYTES) == str(os.getpid()).encode():
                    os.unlink(path)
        self._pid_files.clear()
        for handler in self._handlers.values():
            self._logger.removeHandler(handler)
            handler.close()
            handler.stream.close()
        self._handlers.clear()


def _open_regular(path: str) -> int:
    fd = os.open(path, _OPEN, 0o600)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid != os.geteuid():
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file of ours", path)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    return fd
