# SPDX-License-Identifier: Apache-2.0
"""Checks of paths that clients name, and results in the forms of replies."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from typing import Any

from nvidia_resiliency_ext.attribution._core.files import open_confined
from nvidia_resiliency_ext.attribution._core.verdict import RawAnalysisResultItem
from nvidia_resiliency_ext.attribution.orchestration.config import (
    MODULE_LOG_ANALYZER,
    RESP_MODULE,
    RESP_RESULT,
    ErrorCode,
)
from nvidia_resiliency_ext.attribution.orchestration.llm_output import (
    logsage_recommendation,
    recommendation_payload,
)
from nvidia_resiliency_ext.attribution.orchestration.types import (
    LogAnalyzerError,
    LogSageAnalysisResult,
)
from nvidia_resiliency_ext.shared_utils.errors import PathOutsideRootsError
from nvidia_resiliency_ext.shared_utils.os_utils import resolve_under_allowed_roots

__all__ = [
    "log_analyzer_result_payload",
    "nvrx_run_result_to_log_dict",
    "open_log",
    "selected_log_analyzer_cycle_payload",
    "validate_log_path",
]

_LONGEST_PATH = 4096
_PAIR = 2


def validate_log_path(
    path: Any, allowed_root: str, *, must_exist: bool = True, reject_empty: bool = False
) -> str:
    """Return the real path of a log.

    Args:
        path: As the client named it.
        allowed_root: The log must lie below this directory.
        must_exist: Whether the file must be there; else only its directory. Default True.
        reject_empty: Whether an empty file is refused. Default False.

    Raises:
        LogAnalyzerError: It is not absolute, leads outside of the root, does not exist, is no
            regular file, cannot be read, or is empty.

    Example:
        >>> validate_log_path("/later.log", "/", must_exist=False)
        '/later.log'
    """
    if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path:
        raise LogAnalyzerError(ErrorCode.INVALID_PATH, f"not an absolute path: {path!r:.200}")
    if len(os.fsencode(path)) > _LONGEST_PATH or path.endswith("/"):
        raise LogAnalyzerError(ErrorCode.INVALID_PATH, "too long, or not the path of a file")
    try:
        resolved = resolve_under_allowed_roots(path, [allowed_root])
        status = os.stat(resolved)
    except PathOutsideRootsError:
        raise LogAnalyzerError(
            ErrorCode.OUTSIDE_ROOT, f"outside of the allowed root: {path}"
        ) from None
    except FileNotFoundError:
        if must_exist or not os.path.isdir(os.path.dirname(resolved)):
            raise LogAnalyzerError(ErrorCode.NOT_FOUND, f"not found: {path}") from None
        return resolved
    except (OSError, ValueError) as error:
        raise LogAnalyzerError(ErrorCode.INVALID_PATH, f"{path}: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise LogAnalyzerError(ErrorCode.NOT_REGULAR, f"not a regular file: {path}")
    if not os.access(resolved, os.R_OK):
        raise LogAnalyzerError(ErrorCode.NOT_READABLE, f"cannot be read: {path}")
    if reject_empty and status.st_size == 0:
        raise LogAnalyzerError(ErrorCode.EMPTY_FILE, f"empty: {path}")
    return resolved


def open_log(resolved: str, allowed_root: str) -> int:
    """Open a checked log, and check it again once it is open.

    Args:
        resolved: The resolved path.
        allowed_root: The directory below which it must lie.

    Returns:
        A descriptor that the caller owns.

    Raises:
        LogAnalyzerError: The path is no regular file, or leads outside of the root now.
        OSError: The file cannot be opened.
    """
    try:
        return open_confined(resolved, allowed_root)
    except PathOutsideRootsError:
        message = f"outside of the root: {resolved}"
        raise LogAnalyzerError(ErrorCode.OUTSIDE_ROOT, message) from None
    except OSError as error:
        if error.errno == errno.EINVAL:
            message = f"not a regular file: {resolved}"
            raise LogAnalyzerError(ErrorCode.NOT_REGULAR, message) from None
        raise


def log_analyzer_result_payload(
    items: Iterable[RawAnalysisResultItem], module: str = MODULE_LOG_ANALYZER
) -> dict[str, Any]:
    """Return `{"module", "result", "recommendation"}`.

    Args:
        items: The result items, oldest first.
        module: Name of the analysis. Default "log_analyzer".
    """
    kept = list(items)
    return {
        RESP_MODULE: module,
        RESP_RESULT: [item.to_payload() for item in kept],
        "recommendation": recommendation_payload(logsage_recommendation(kept, source=module)),
    }


def selected_log_analyzer_cycle_payload(
    log_result: dict[str, Any], result_item: RawAnalysisResultItem
) -> dict[str, Any]:
    """Return a result reduced to one cycle's item.

    Args:
        log_result: The result with all items.
        result_item: The item to keep.
    """
    module = str(log_result.get(RESP_MODULE) or MODULE_LOG_ANALYZER)
    return {**log_result, **log_analyzer_result_payload([result_item], module)}


def nvrx_run_result_to_log_dict(result: Any, path: str) -> dict[str, Any]:
    """Convert the result of a log analysis to the object of a reply.

    Args:
        result: `(result, state)`, a list of items, or `LogSageAnalysisResult`.
        path: The log, for the error.

    Raises:
        RuntimeError: It is none of these.
    """
    if isinstance(result, tuple) and len(result) == _PAIR:
        result = result[0]
    items = result.items if isinstance(result, LogSageAnalysisResult) else result
    if not isinstance(items, list) or not all(isinstance(i, RawAnalysisResultItem) for i in items):
        kind = type(result).__name__
        raise RuntimeError(f"the analysis of {path} returned a {kind}, not result items")
    return log_analyzer_result_payload(items)
