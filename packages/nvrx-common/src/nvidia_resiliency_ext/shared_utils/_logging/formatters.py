# SPDX-License-Identifier: Apache-2.0
"""Owns how a log record becomes a line: the text format, its JSON form; opens no file."""

from __future__ import annotations

import json
import logging
import time

__all__ = ["DynamicLogFormatter", "JsonLineFormatter", "TextLineFormatter", "line_format"]


def line_format(
    node: str, workload: tuple[int | None, int | None], infra: tuple[int | None, int | None]
) -> str:
    """Return the format of a text line of this process; what never changes is part of it.

    Args:
        node: The node's name; any character may be in it.
        workload: Rank and local rank of the worker.
        infra: Rank and local rank of the launcher.
    """
    workload_rank, workload_local_rank = map(_shown, workload)
    infra_rank, infra_local_rank = map(_shown, infra)
    name = node.replace("%", "%%")
    return (
        f"%(asctime)s [%(levelname)s] [{name}]"
        f" [workload:{workload_rank}({workload_local_rank})"
        f" infra:{infra_rank}({infra_local_rank})]"
        " %(filename)s:%(lineno)d %(message)s"
    )


class TextLineFormatter(logging.Formatter):
    """Formats as the standard library does, without computing the same second again."""

    # Second and its text: most records share their second with the one before. One tuple, so that
    # threads never see the text of another second.
    _second: tuple[int, str] = (-1, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - the standard library's name
        """Return the record's local time, with milliseconds unless a format is given.

        Args:
            record: The record.
            datefmt: Format of `time.strftime`.
        """
        if datefmt:
            return super().formatTime(record, datefmt)
        second = int(record.created)
        known, text = self._second
        if known != second:
            text = time.strftime("%Y-%m-%d %H:%M:%S", self.converter(second))
            self._second = (second, text)
        return f"{text},{int(record.msecs):03d}"


class DynamicLogFormatter(TextLineFormatter):
    """Gives each record the four ranks of its process before formatting it.

    Args:
        workload_rank: Global rank of the worker, None when unknown (shown as ``?``).
        workload_local_rank: The worker's rank on its node.
        infra_rank: Rank of the launcher.
        infra_local_rank: The launcher's rank on its node.
        fmt: Format as of ``logging.Formatter``; may name the four arguments above as fields.
        datefmt: Format of the time as of ``logging.Formatter``.
    """

    def __init__(
        self,
        workload_rank: int | None = None,
        workload_local_rank: int | None = None,
        infra_rank: int | None = None,
        infra_local_rank: int | None = None,
        fmt: str | None = None,
        datefmt: str | None = None,
    ) -> None:
        super().__init__(fmt=fmt, datefmt=datefmt)
        self._ranks = {
            "workload_rank": _shown(workload_rank),
            "workload_local_rank": _shown(workload_local_rank),
            "infra_rank": _shown(infra_rank),
            "infra_local_rank": _shown(infra_local_rank),
        }

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text.

        Args:
            record: The record.
        """
        record.__dict__.update(self._ranks)
        return super().format(record)


class JsonLineFormatter(logging.Formatter):
    """Makes one JSON object per record: ts, level, node, ranks, cycle, file, line, msg, exc.

    ``cycle`` is the record's own (``extra={"cycle": 3}``) where it has one.
    """

    def __init__(self, node: str, ranks: dict[str, int | None], cycle: int | None) -> None:
        super().__init__()
        self._node = node
        self._ranks = ranks
        self._cycle = cycle

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "ts": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "node": self._node,
            "ranks": self._ranks,
            "cycle": getattr(record, "cycle", self._cycle),
            "file": record.filename,
            "line": record.lineno,
            "msg": record.getMessage(),
            "exc": self.formatException(record.exc_info) if record.exc_info else record.exc_text,
        }
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json.dumps(fields, separators=(",", ":"), default=str)


def _shown(rank: int | None) -> str:
    return "?" if rank is None else str(rank)
