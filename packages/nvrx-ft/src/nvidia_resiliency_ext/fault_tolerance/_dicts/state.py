# SPDX-License-Identifier: Apache-2.0
"""Finding and applying what is new between two states, as nested dicts or as namespaces."""

from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._dicts.nested import diff

__all__ = [
    "compare_namespaces",
    "compare_state_dicts_and_get_new_values",
    "merge_namespace_changes",
    "merge_namespaces_",
    "merge_state_dicts_",
]


def merge_state_dicts_(
    current: MutableMapping[Any, Any], incoming: Mapping[Any, Any]
) -> MutableMapping[Any, Any]:
    """Update `current` with `incoming`, branch by branch; `incoming` wins; return `current`."""
    for key, value in incoming.items():
        present = current.get(key)
        if isinstance(present, MutableMapping) and isinstance(value, Mapping):
            merge_state_dicts_(present, value)
        else:
            current[key] = value
    return current


def compare_state_dicts_and_get_new_values(
    curr: Mapping[Any, Any], new: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Return the part of `new` that is absent from `curr` or differs there."""
    changes: dict[Any, Any] = {}
    for key, value in new.items():
        if key not in curr:
            changes[key] = value
        elif isinstance(value, Mapping) and isinstance(curr[key], Mapping):
            inner = compare_state_dicts_and_get_new_values(curr[key], value)
            if inner:
                changes[key] = inner
        elif any(diff(curr[key], value)):
            changes[key] = value
    return changes


def merge_namespaces_(ns1: Namespace, ns2: Namespace) -> Namespace:
    """Set every attribute of `ns2` on `ns1`; return `ns1`."""
    vars(ns1).update(vars(ns2))
    return ns1


def compare_namespaces(ns1: Namespace, ns2: Namespace) -> dict[str, Any]:
    """Return the attributes of `ns2` that are absent from `ns1` or differ there."""
    return compare_state_dicts_and_get_new_values(vars(ns1), vars(ns2))


def merge_namespace_changes(ns: Namespace, changes: Mapping[str, Any]) -> Namespace:
    """Apply what `compare_namespaces` found; return `ns`."""
    merge_state_dicts_(vars(ns), changes)
    return ns
