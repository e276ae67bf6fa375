# SPDX-License-Identifier: Apache-2.0
"""What the launcher and the user say through the environment; checked, and kept nowhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANKS = ("RANK", "WORLD_SIZE")
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
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


def world_size() -> int:
    """Return how many processes there are.

    Raises:
        ConfigError: The environment does not say it; the message names the variable.
    """
    text = os.environ.get("WORLD_SIZE", "")
    if not _is_number(text):
        raise ConfigError(
            f"WORLD_SIZE={text[:64]!r} in the environment is no number, and no world_size is given"
        )
    return int(text)


def local_rank() -> int | None:
    """Return this rank's number on its node, `None` where the environment does not say it."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if _is_number(text) else None


def exported_ranks() -> dict[str, str | None]:
    """Return what stands where `export_ranks` writes, for `restore_ranks`."""
    return {name: os.environ.get(name) for name in _RANKS}


def restore_ranks(before: Mapping[str, str | None]) -> None:
    """Put back what `exported_ranks` has returned."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def export_ranks(rank: int, world_size: int) -> None:
    """Set what `torch.distributed` reads at its start."""
    os.environ["RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = str(world_size)


def wants_verbose_ranks() -> bool:
    """Say whether sets of ranks are logged in full."""
    return os.environ.get("NVRX_LOG_RANK_FORMAT_VERBOSE", "").strip().lower() in _TRUE


def launch_cycle() -> int | None:
    """Return how often the launcher has started this job again, `None` without a launcher."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if _is_number(text) else None


def active_world_size() -> int:
    """Return how many ranks run the function, 0 where the environment does not say it."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if _is_number(text) else 0


def flight_record_path() -> str | None:
    """Return the folder for flight records, `None` if none is wanted."""
    return os.environ.get("NVRX_FR_TRACE_PATH") or None


def flight_recorder_size() -> int:
    """Return how many entries torch's flight recorder keeps; 0 if it is off.

    Raises:
        ValueError: It is set and is no number; the message names it.
    """
    sizes = (_recorder_size(name, os.environ[name]) for name in _SIZES if os.environ.get(name))
    return max(sizes, default=0)


def _recorder_size(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text[:64]!r} in the environment is not a number") from None


def _is_number(text: str) -> bool:
    stripped = text.strip()
    return stripped.isascii() and stripped.isdigit() and len(stripped) < 10  # noqa: PLR2004
