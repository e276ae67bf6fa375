# SPDX-License-Identifier: Apache-2.0
"""Finding the dumps that belong to a log, and the result of their analysis in its known forms."""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.attribution._core.errors import NoTraceError
from nvidia_resiliency_ext.attribution._core.files import open_confined
from nvidia_resiliency_ext.shared_utils.errors import PathOutsideRootsError
from nvidia_resiliency_ext.shared_utils.os_utils import resolve_under_allowed_roots
from nvidia_resiliency_ext.shared_utils.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "FR_DUMP_PATH_ENV",
    "FR_DUMP_PATH_LOG_LINE_PATTERN",
    "FR_DUMP_PATH_LOG_SCAN_LINES",
    "FRAnalysisResult",
    "TraceAnalyzer",
    "analyze_fr_dump",
    "extract_fr_dump_path",
    "fr_fields_for_dataflow_record",
    "fr_markdown_appendix",
    "fr_markdown_appendix_from_result",
    "fr_path_resolvable_for_collective_analyzer",
    "fr_result_from_mcp_module_response",
]

logger = logging.getLogger("nvrx")

FR_DUMP_PATH_ENV = "TORCH_FR_DUMP_TEMP_FILE"
FR_DUMP_PATH_LOG_LINE_PATTERN = re.compile(rf"{FR_DUMP_PATH_ENV}=(\S+)")
FR_DUMP_PATH_LOG_SCAN_LINES = 1000

_LINE_BYTES = 64 * 1024
_DUMP_NAMES = "_dump_*"
_RANKS_TEXT = re.compile(r"hanging ranks:\s*\[([\d,\s]*)\]")
_LONGEST_RANK = 9
_EXPORTED = 1 << 14


@dataclass(frozen=True)
class FRAnalysisResult:
    """Result of the analysis of a job's dumps.

    Attributes:
        analysis_text: Summary and table, for people and for callers that parse the table.
        hanging_ranks: Such as `hanging ranks: [1, 2]`.
        report: The whole as `nvrx_fr_report.v1`; None when another program made the result.
    """

    analysis_text: str
    hanging_ranks: str
    report: dict[str, Any] | None = None


class TraceAnalyzer:
    """Find and analyse the dumps that belong to a log.

    Args:
        allowed_root: Dumps outside of this directory are not read; None: anywhere.
    """

    def __init__(self, allowed_root: str | None = None) -> None:
        self.allowed_root = allowed_root

    def discover_fr_dump_path(self, log_path: str) -> str | None:
        """Return where the dumps of a log's job are: a directory or a prefix; None if unknown.

        Args:
            log_path: The log, below the allowed root.
        """
        return extract_fr_dump_path(log_path, self.allowed_root)

    async def analyze_fr_dump(self, dump_path: str) -> FRAnalysisResult | None:
        """Analyse dumps; return None, and log why, if that is not possible.

        Args:
            dump_path: Directory, file or prefix of the dumps.
        """
        return await _analyze_in_thread(dump_path, self.allowed_root)


def extract_fr_dump_path(log_path: str, allowed_root: str | None = None) -> str | None:
    """Return where the dumps of a log's job are.

    Looked at in this order: a prefix that the job printed as `TORCH_FR_DUMP_TEMP_FILE=...` in the
    first 1000 lines; `checkpoints/` beside the log; for a log below a directory `logs`,
    `checkpoints/` beside that.

    Args:
        log_path: The log.
        allowed_root: What does not resolve below this directory is skipped; None: no limit.

    Returns:
        A prefix or a directory in which there are dumps, or None.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     os.mkdir(f"{folder}/checkpoints")
        ...     open(f"{folder}/checkpoints/_dump_0", "w").close()
        ...     extract_fr_dump_path(f"{folder}/job.log") == f"{folder}/checkpoints"
        True
    """
    for candidate in _candidates(log_path, allowed_root):
        resolved = candidate if allowed_root is None else _resolved(candidate, allowed_root)
        if resolved is None:
            continue
        if os.path.isdir(resolved):
            if glob.glob(os.path.join(glob.escape(resolved), _DUMP_NAMES)):
                return resolved
        elif glob.glob(glob.escape(resolved) + "*"):
            return resolved
    return None


def fr_path_resolvable_for_collective_analyzer(path: str) -> bool:
    """Return whether a path is a directory, a file, or a prefix of files.

    Args:
        path: The path.
    """
    return os.path.exists(path) or bool(glob.glob(glob.escape(path) + "*"))


async def analyze_fr_dump(dump_path: str) -> FRAnalysisResult | None:
    """Analyse the dumps of a job, in a thread; None, and a log line, when that is not possible.

    Args:
        dump_path: Directory, prefix or single file.
    """
    return await _analyze_in_thread(dump_path, None)


def fr_result_from_mcp_module_response(resp: Any) -> FRAnalysisResult | None:
    """Return the result in the reply of the module `fr_analyzer`; None for an error.

    Args:
        resp: The decoded reply.
    """
    result = resp.get("result") if isinstance(resp, dict) else None
    if isinstance(result, str) and result.lstrip()[:1] == "{":
        try:
            result = json.loads(result)
        except ValueError:
            return None
    if isinstance(result, str) and result:
        return FRAnalysisResult(result, "")
    if isinstance(result, dict) and isinstance(result.get("analysis_text"), str):
        return FRAnalysisResult(result["analysis_text"], str(result.get("hanging_ranks", "")))
    return None


def fr_fields_for_dataflow_record(
    path: str | None, result: FRAnalysisResult | None
) -> dict[str, Any]:
    """Return the fields of an exported record about the dumps; their text without secrets, cut.

    Args:
        path: Where the dumps are.
        result: Their analysis.
    """
    text = result.analysis_text if result is not None else ""
    return {
        "s_fr_dump_path": path or "",
        "s_fr_analysis": redact(text[: 2 * _EXPORTED])[0][:_EXPORTED],
        "s_hanging_ranks": result.hanging_ranks if result is not None else "",
        "l_hanging_ranks": ranks_in(result.hanging_ranks) if result is not None else [],
    }


def fr_markdown_appendix(*, dump_path: str | None, analysis_text: str, hanging_ranks: str) -> str:
    """Return a section for a posted message; empty unless it names a rank.

    Args:
        dump_path: Where the dumps are.
        analysis_text: The text of their analysis.
        hanging_ranks: The ranks that hold the job up, as text.
    """
    if not ranks_in(hanging_ranks):
        return ""
    # The text goes into a code block, which it must not be able to close.
    body = analysis_text.replace("```", "'''")
    where = f" of `{dump_path.replace('`', '')}`" if dump_path else ""
    return f"\n\n**Flight recorder**{where}: {hanging_ranks}\n```\n{body}\n```\n"


def fr_markdown_appendix_from_result(dump_path: str | None, result: FRAnalysisResult | None) -> str:
    """Return `fr_markdown_appendix` of a result; empty for None.

    Args:
        dump_path: Where the dumps are.
        result: Their analysis.
    """
    if result is None:
        return ""
    return fr_markdown_appendix(
        dump_path=dump_path, analysis_text=result.analysis_text, hanging_ranks=result.hanging_ranks
    )


async def _analyze_in_thread(dump_path: str, allowed_root: str | None) -> FRAnalysisResult | None:
    import asyncio

    return await asyncio.to_thread(_analyze, dump_path, allowed_root)


def _analyze(dump_path: str, allowed_root: str | None) -> FRAnalysisResult | None:
    from nvidia_resiliency_ext.attribution._traces.analysis import (
        analyze_traces,
        hanging_ranks_text,
    )
    from nvidia_resiliency_ext.attribution._traces.table import format_summary, format_table

    try:
        analysis = analyze_traces(dump_path, allowed_root=allowed_root)
        text = format_summary(analysis) + format_table(analysis, include_device_lag=True)
        ranks, report = hanging_ranks_text(analysis.guilty_ranks), analysis.to_dict()
    except (NoTraceError, OSError) as error:
        logger.warning("no flight-recorder analysis: %s", error)
        return None
    except Exception:
        # Boundary: a caller that asks for the traces of a dead job must get its log analysis.
        logger.exception("the flight-recorder analysis of %s failed", dump_path)
        return None
    return FRAnalysisResult(text, ranks, report)


def _candidates(log_path: str, allowed_root: str | None) -> Iterator[str]:
    printed = _printed_prefix(log_path, allowed_root)
    if printed is not None:
        yield printed
    folder = os.path.dirname(os.path.abspath(log_path))
    yield os.path.join(folder, "checkpoints")
    parts = folder.split(os.sep)
    if "logs" in parts:
        last = len(parts) - 1 - parts[::-1].index("logs")
        yield os.path.join(os.sep.join(parts[:last]) or os.sep, "checkpoints")


def _printed_prefix(log_path: str, allowed_root: str | None) -> str | None:
    try:
        with open(open_confined(log_path, allowed_root), "rb") as log:
            for _ in range(FR_DUMP_PATH_LOG_SCAN_LINES):
                line = log.readline(_LINE_BYTES)
                if not line:
                    return None
                match = FR_DUMP_PATH_LOG_LINE_PATTERN.search(line.decode("utf-8", "replace"))
                # A prefix: a directory says nothing about which files are dumps.
                if match is not None and not os.path.isdir(match[1]):
                    return match[1]
    except OSError as error:
        logger.debug("no dump path from %s: %s", log_path, error)
    return None


def _resolved(path: str, allowed_root: str) -> str | None:
    try:
        return resolve_under_allowed_roots(path, [allowed_root])
    except (PathOutsideRootsError, ValueError):
        return None


def ranks_in(text: str) -> list[int]:
    """Return the ranks in a text such as `hanging ranks: [1, 2]`; empty where there is none."""
    match = _RANKS_TEXT.search(text)
    if match is None:
        return []
    return [int(part) for part in match[1].split(",") if part.strip() and len(part) < _LONGEST_RANK]
