# SPDX-License-Identifier: Apache-2.0
"""Options of queues, writers and loads: arguments first, then the environment, then defaults."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

IO_MODES = ("auto", "buffered", "direct")
_ON_ERROR = ("raise", "warn")
_ON_FULL = ("wait", "skip", "error")
_T = TypeVar("_T")


class QueueOptions:
    """How a queue deals with failures and with too many saves; None takes the default.

    Args:
        save_timeout: Seconds after which a save that is not written has failed; None for never.
        max_pending: How many saves may hold a staging buffer.
        on_full: "wait" for the oldest one, "skip" the new save, or "error".
        on_error: "raise" a failed save, or "warn" and go on.
        retries: How often the worker tries again to write after an error of the file system.
        retry_delay: Seconds before the first new attempt; doubled each time, 60 at most.
        max_failures: With "warn": raise after this many failures in a row; None for never.

    Raises:
        ValueError: An argument or a variable has a value that is not allowed.
    """

    def __init__(  # noqa: PLR0913 - one for each option
        self,
        *,
        save_timeout: float | None,
        max_pending: int | None,
        on_full: str,
        on_error: str | None,
        retries: int | None,
        retry_delay: float,
        max_failures: int | None,
    ) -> None:
        timeout = _given(save_timeout, "NVRX_CKPT_SAVE_TIMEOUT", float, None)
        pending = _given(max_pending, "NVRX_CKPT_MAX_PENDING", int, 1)
        error = _given(on_error, "NVRX_CKPT_ON_ERROR", str, "raise")
        _check("on_error (NVRX_CKPT_ON_ERROR)", error, _ON_ERROR)
        _check("on_full", on_full, _ON_FULL)
        if retries is None:
            retries = 3 if error == "warn" else 0
        for name, value, least in (
            ("max_pending (NVRX_CKPT_MAX_PENDING)", pending, 1),
            ("max_failures", max_failures, 1),
            ("retries", retries, 0),
            ("retry_delay", retry_delay, 0),
        ):
            if value is not None and not value >= least:
                raise ValueError(f"{name} is {value}; at least {least} is needed")
        if timeout is not None and not timeout > 0:
            name = "save_timeout (NVRX_CKPT_SAVE_TIMEOUT)"
            raise ValueError(f"{name} is {timeout}; a number of seconds above 0 is needed")
        self.save_timeout, self.max_pending = timeout, pending
        self.on_full, self.on_error = on_full, error
        self.retries, self.retry_delay, self.max_failures = retries, retry_delay, max_failures


def io_mode_option(given: str | None) -> str:
    """Return how files are written: "auto", "buffered" or "direct".

    Raises:
        ValueError: It is none of these.
    """
    mode = _given(given, "NVRX_CKPT_IO_MODE", str, "auto")
    _check("io_mode (NVRX_CKPT_IO_MODE)", mode, IO_MODES)
    return mode


def staging_dir_option(given: str | os.PathLike[str] | None) -> str | None:
    """Return the node-local directory that files are written to first, or None."""
    text = path_text(given) if given is not None else os.environ.get("NVRX_CKPT_STAGING_DIR")
    return os.path.abspath(text) if text else None


def verify_option(*, default: bool) -> bool:
    """Return whether what is loaded is compared with its checksums.

    Args:
        default: Where `NVRX_CKPT_VERIFY_ON_LOAD` is not set.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    return _given(None, "NVRX_CKPT_VERIFY_ON_LOAD", _flag, default)


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as text.

    Raises:
        ValueError: It holds a null character, which no path can.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise ValueError(f"{text!r} is no path: it holds a null character")
    return text


def _given(value: _T | None, variable: str, parse: Callable[[str], _T], default: _T) -> _T:
    if value is not None:
        return value
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{variable}={text!r}: {error}") from None


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("allowed are 0 and 1")
    return text == "1"


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
