# SPDX-License-Identifier: Apache-2.0
"""What the launcher and the user say through the environment; checked, and kept nowhere."""

from __future__ import annotations

import os

_TRUE = frozenset({"true", "1", "yes", "on"})


def number(name: str, default: int) -> int:
    """Return a number of the environment.

    Raises:
        ValueError: It is set and is none; the message names it.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not _is_number(text):
        raise ValueError(f"{name}={text[:64]!r} in the environment is not a number")
    return int(text)


def local_rank() -> int | None:
    """Return this rank's number on its node, `None` where the environment does not say it."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if _is_number(text) else None


def export_ranks(rank: int, world_size: int) -> None:
    """Set what `torch.distributed` reads at its start."""
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(world_size)


def wants_verbose_ranks() -> bool:
    """Say whether sets of ranks are logged in full."""
    return os.environ.get("NVRX_LOG_RANK_FORMAT_VERBOSE", "").strip().lower() in _TRUE


def _is_number(text: str) -> bool:
    stripped = text.strip()
    return stripped.isascii() and stripped.isdigit() and len(stripped) < 10  # noqa: PLR2004
