# SPDX-License-Identifier: Apache-2.0
"""The logger "nvrx": its settings in the environment, and its handler.

An invalid value gives one warning, and the default is used: logging is set up while modules are
imported, where an exception would end a job because of a typing error.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping
from typing import TextIO

from nvidia_resiliency_ext.shared_utils._logging.handler import (
    JsonLineFormatter,
    NodeLocalTmpLogHandler,
    TextLineFormatter,
    line_format,
    open_log_directory,
)

__all__ = ["LogConfig", "LogManager", "setup_logger"]

_MAX_FILE_SIZE_KB = 10240
_MAX_LOG_FILES = 4
_TRUE = frozenset({"1", "true", "yes", "on"})


def _integer(name: str, default: int | None = None) -> int | None:
    """Return a variable as a number of 0 or more, else ``default`` and one warning."""
    given = os.environ.get(name, "").strip()
    if not given:
        return default
    if given.isascii() and given.isdigit():
        return int(given[:18])
    shown = "ignored" if default is None else f"using {default}"
    _warn_once(f"{name}={given[:64]!r} is not a number of 0 or more: {shown}")
    return default


def _flag(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(name, "").strip().lower() in _TRUE


class LogConfig:
    """Logging settings of the environment, read at each call; never instantiated."""

    name = "nvrx"
    _aggr_file_prefix = "nvrx_log_"

    @classmethod
    def get_node_id(cls) -> str:
        """Return the name of this host."""
        return socket.gethostname()

    @classmethod
    def get_log_file(cls) -> str:
        """Return the name of this node's merged log file."""
        return f"{cls._aggr_file_prefix}{cls.get_node_id()}.log"

    @classmethod
    def get_node_local_tmp_dir(cls, node_local_tmp_dir: str | None = None) -> str | None:
        """Return `node_local_tmp_dir`, else `NVRX_NODE_LOCAL_TMPDIR`; None: no per-node files."""
        return node_local_tmp_dir or os.environ.get("NVRX_NODE_LOCAL_TMPDIR") or None

    @classmethod
    def get_max_file_size(cls, file_size_kb: int | None = None) -> int:
        """Return the size in bytes at which a process begins its next per-node log file.

        It is `file_size_kb` (KiB), else `NVRX_LOG_MAX_FILE_SIZE_KB` or its default.
        """
        if file_size_kb is None:
            file_size_kb = _integer("NVRX_LOG_MAX_FILE_SIZE_KB", _MAX_FILE_SIZE_KB)
        return (file_size_kb or 0) * 1024

    @classmethod
    def get_max_log_files(cls) -> int:
        """Return the number of older per-node log files to keep."""
        return _integer("NVRX_LOG_MAX_LOG_FILES", _MAX_LOG_FILES) or 0

    @classmethod
    def get_workload_rank(cls) -> int | None:
        """Return the global rank of this worker."""
        return _integer("RANK")

    @classmethod
    def get_workload_local_rank(cls) -> int | None:
        """Return this worker's rank on its node."""
        return _integer("LOCAL_RANK")

    @classmethod
    def get_infra_rank(cls) -> int | None:
        """Return the rank that Slurm gave to this process, counted over a whole array."""
        proc_id, task_id = _integer("SLURM_PROCID"), _integer("SLURM_ARRAY_TASK_ID")
        if proc_id is None or task_id is None:
            return proc_id
        # The tasks of an array number their processes from 0 each.
        nnodes = _integer("SLURM_NNODES")
        if nnodes is None:
            nnodes = _integer("SLURM_JOB_NUM_NODES")
        return proc_id if nnodes is None else task_id * nnodes + proc_id

    @classmethod
    def get_infra_local_rank(cls) -> int | None:
        """Return the rank that Slurm gave to this process on its node."""
        return _integer("SLURM_LOCALID")

    @classmethod
    def get_log_level(cls, environ: Mapping[str, str] = os.environ) -> int:
        """Return `logging.DEBUG` if `NVRX_LOG_DEBUG` is set in `environ`, else `logging.INFO`."""
        return logging.DEBUG if _flag("NVRX_LOG_DEBUG", environ) else logging.INFO

    @classmethod
    def get_process_name(cls, proc_name: str | None = None) -> str:
        """Return the name of this process in log files: `proc_name`, else the process number."""
        return proc_name or str(os.getpid())

    @classmethod
    def get_log_to_stdout_cfg(cls) -> bool:
        """Return whether the console handler writes to stdout instead of stderr."""
        return _flag("NVRX_LOG_TO_STDOUT")


class LogManager:
    """Configures the logger "nvrx" once, at construction, from arguments and environment.

    The handlers of an earlier manager are flushed and closed at once; handlers of the user stay.
    Any thread may construct a manager: the last one is used.

    Args:
        node_local_tmp_dir: Directory of per-node files; default ``NVRX_NODE_LOCAL_TMPDIR``.
        node_local_tmp_prefix: Name of this process in their names; default its pid.
        log_file: Append to this file instead.

    Attributes:
        logger: The logger "nvrx".
        log_level: Its level.
        node_local_tmp_logging_enabled: Whether a directory of per-node log files is configured.
        workload_rank: Global rank of this worker, None where it has none.
        workload_local_rank: Its rank on its node.
        infra_rank: Rank that the scheduler gave to this process.
        infra_local_rank: The same on its node.
    """

    def __init__(
        self,
        node_local_tmp_dir: str | None = None,
        node_local_tmp_prefix: str | None = None,
        log_file: str | None = None,
    ) -> None:
        with _state.lock, _HeldWarnings():
            self.workload_rank = LogConfig.get_workload_rank()
            self.workload_local_rank = LogConfig.get_workload_local_rank()
            self.infra_rank = LogConfig.get_infra_rank()
            self.infra_local_rank = LogConfig.get_infra_local_rank()
            self.log_level = LogConfig.get_log_level()
            directory = LogConfig.get_node_local_tmp_dir(node_local_tmp_dir)
            self.node_local_tmp_logging_enabled = directory is not None
            self.logger = logging.getLogger(LogConfig.name)
            handler = self._make_handler(directory, node_local_tmp_prefix, log_file)
            handler.setFormatter(self._make_formatter(has_log_file=bool(log_file)))
            _state.replace_handlers(self.logger, handler)
            self.logger.setLevel(self.log_level)
            self.logger.propagate = False

    def _make_handler(
        self, directory: str | None, prefix: str | None, log_file: str | None
    ) -> logging.Handler:
        if log_file:
            return logging.FileHandler(log_file, mode="a", encoding="utf-8")
        if directory is None:
            return _ConsoleHandler(is_stdout=LogConfig.get_log_to_stdout_cfg())
        os.close(open_log_directory(directory))
        limits = LogConfig.get_max_file_size(), LogConfig.get_max_log_files()
        name = LogConfig.get_process_name(prefix)
        return NodeLocalTmpLogHandler(self.workload_rank, directory, *limits, name)

    def _make_formatter(self, *, has_log_file: bool) -> logging.Formatter:
        node = LogConfig.get_node_id()
        form = os.environ.get("NVRX_LOG_FORMAT", "").strip().lower()
        if form not in {"", "text", "json"}:
            _warn_once(f"NVRX_LOG_FORMAT={form[:64]!r} is neither text nor json: using text")
        if form == "json":
            ranks = {
                "workload": self.workload_rank,
                "workload_local": self.workload_local_rank,
                "infra": self.infra_rank,
                "infra_local": self.infra_local_rank,
            }
            return JsonLineFormatter(node, ranks, _integer("NVRX_CYCLE"))
        workload = (self.workload_rank, self.workload_local_rank)
        fmt = line_format(node, workload, (self.infra_rank, self.infra_local_rank))
        return TextLineFormatter((self._file_prefix() if has_log_file else "") + fmt)

    def _file_prefix(self) -> str:
        """Return ``<infra rank>: ``, as wide as the highest rank of the job."""
        rank = "?" if self.infra_rank is None else str(self.infra_rank)
        world_size = _integer("WORLD_SIZE")
        return f"{rank.rjust(len(str(world_size - 1)) if world_size else 0)}: "


def setup_logger(
    node_local_tmp_dir: str | None = None,
    force_reset: bool = False,
    node_local_tmp_prefix: str | None = None,
    log_file: str | None = None,
) -> logging.Logger:
    """Configure the logger "nvrx" and return it; no effect if it already has handlers.

    Args:
        node_local_tmp_dir: Directory of per-node files; default ``NVRX_NODE_LOCAL_TMPDIR``.
        force_reset: Configure it again from the current environment.
        node_local_tmp_prefix: Name of this process in the names of those files.
        log_file: Append to this file instead.

    Example:
        >>> logger = setup_logger()
        >>> logger.info("ready")
    """
    logger = logging.getLogger(LogConfig.name)
    with _state.lock:
        if force_reset or not logger.handlers:
            LogManager(node_local_tmp_dir, node_local_tmp_prefix, log_file)
    return logger


class _ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not in Python 3.10
    """Writes to what ``sys.stderr`` or ``sys.stdout`` is at that moment, as tests replace it."""

    def __init__(self, *, is_stdout: bool) -> None:
        logging.Handler.__init__(self)
        self._is_stdout = is_stdout
        self._given: TextIO | None = None

    @property
    def stream(self) -> TextIO:
        """The stream that was set, else the one of this moment."""
        return self._given or (sys.stdout if self._is_stdout else sys.stderr)

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        self._given = stream


class _HeldWarnings:
    """Keeps warnings back until a handler is there to take them."""

    def __enter__(self) -> None:
        _state.held = []

    def __exit__(self, *error: object) -> None:
        messages, _state.held = _state.held or [], None
        for message in messages:
            logging.getLogger(LogConfig.name).warning("%s", message)


class _State:
    """The state of this module, all of it under ``lock``."""

    def __init__(self) -> None:
        self.handlers: list[logging.Handler] = []
        self.warned: set[str] = set()
        self.held: list[str] | None = None
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace a lock that a thread of the parent may have held while it forked."""
        self.lock = threading.RLock()

    def replace_handlers(self, logger: logging.Logger, handler: logging.Handler) -> None:
        """Put ``handler`` in the place of those that were installed here before."""
        # A fork may happen between any two steps, and the child must know every handler of ours.
        self.handlers.append(handler)
        logger.addHandler(handler)
        for unused in self.handlers[:-1]:
            logger.removeHandler(unused)
            try:
                unused.flush()
            except (OSError, ValueError) as error:
                # The disk is full or somebody closed the stream: the handler goes all the same.
                logger.debug("log handler not flushed: %s", error)
            unused.close()
            self.handlers.remove(unused)


def _warn_once(message: str) -> None:
    with _state.lock:
        if message in _state.warned:
            return
        _state.warned.add(message)
        if _state.held is not None:
            _state.held.append(message)
            return
    logging.getLogger(LogConfig.name).warning("%s", message)


_state = _State()
os.register_at_fork(after_in_child=_state.renew_lock)
