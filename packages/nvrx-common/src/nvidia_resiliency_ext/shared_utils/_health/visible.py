# SPDX-License-Identifier: Apache-2.0
"""Which device does a local rank mean? Owns the rules of CUDA_VISIBLE_DEVICES; reads nothing."""

from __future__ import annotations

__all__ = ["device_of_rank", "full_uuid", "visible_devices"]


def device_of_rank(rank: int, visible: str | None) -> int | str | None:
    """Return the device that a local rank uses.

    A rank beyond the list names a device of the node itself: launchers that give each rank its own
    device keep counting ranks over the node.

    Args:
        rank: Local rank, or ordinal of a CUDA device.
        visible: Value of CUDA_VISIBLE_DEVICES, `None` when unset.

    Returns:
        An index as the driver counts, a (perhaps shortened) UUID of a GPU or MIG device, or `None`
        when the list hides all devices.
    """
    if visible is None:
        return rank
    entries = _entries(visible)
    if not entries:
        return None
    return entries[rank] if 0 <= rank < len(entries) else rank


def visible_devices(visible: str | None, present: int) -> list[int | str]:
    """Return the devices that a process sees, by ordinal, as `device_of_rank` names them.

    Args:
        visible: Value of CUDA_VISIBLE_DEVICES, `None` when unset.
        present: How many GPUs the driver has.
    """
    if visible is None:
        return list(range(present))
    found: list[int | str] = []
    for entry in _entries(visible):
        if isinstance(entry, int) and entry >= present:
            break
        found.append(entry)
    return found


def full_uuid(shortened: str, uuids: list[str]) -> str | None:
    """Return the only UUID that begins with the text, as CUDA allows; `None` if none or several."""
    found = [uuid for uuid in uuids if uuid.lower().startswith(shortened.lower())]
    return found[0] if len(found) == 1 else None


def _entries(visible: str) -> list[int | str]:
    found: list[int | str] = []
    for text in visible.split(","):
        entry = text.strip()
        if entry.isascii() and entry.isdigit():
            found.append(int(entry[:9]))
        elif entry.upper().startswith(("GPU-", "MIG-")):
            found.append(entry)
        else:
            # CUDA ignores what follows the first entry that makes no sense, such as -1.
            break
    return found
