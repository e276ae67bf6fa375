# SPDX-License-Identifier: Apache-2.0
"""Name the place of a value in a state for messages, as in `model['layers'][3]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def parts_of(path: str, item: Any) -> list[tuple[str, Any]]:
    """Return the items of a dict, list or tuple, or an object's attributes, with their paths."""
    if isinstance(item, dict):
        parts = [(f"{path}[{key!r}]", value) for key, value in item.items()]
    elif isinstance(item, (list, tuple)):
        parts = [(f"{path}[{index}]", value) for index, value in enumerate(item)]
    elif hasattr(item, "__dict__") and not isinstance(item, type) and not callable(item):
        dot = "." if path else ""
        parts = [(f"{path}{dot}{name}", value) for name, value in vars(item).items()]
    else:
        parts = []
    return parts[::-1]


def place_where(state: Any, holds: Callable[[Any], bool]) -> str:
    """Return the path of the innermost part for which something holds, as it does for the state."""
    path, item = "", state
    seen = {id(state)}
    while True:
        for inner_path, inner in parts_of(path, item):
            if id(inner) not in seen and holds(inner):
                seen.add(id(inner))
                path, item = inner_path, inner
                break
        else:
            return path or "the state"


def place_that_fails(state: Any, dump: Callable[[Any], object]) -> str:
    """Return the path of the innermost part with which a function fails, as with the state."""

    def fails(item: Any) -> bool:
        try:
            dump(item)
        except Exception:  # noqa: BLE001 - any error of a user's class means the same here
            return True
        return False

    return place_where(state, fails)


def place_of_cycle(item: Any, path: str = "", above: frozenset[int] = frozenset()) -> str:
    """Return the path of a container that is in itself; empty if there is none."""
    if id(item) in above:
        return path
    if isinstance(item, (dict, list, tuple)):
        for inner_path, inner in parts_of(path, item):
            if found := place_of_cycle(inner, inner_path, above | {id(item)}):
                return found
    return ""
