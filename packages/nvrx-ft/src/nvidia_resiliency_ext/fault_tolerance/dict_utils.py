# SPDX-License-Identifier: Apache-2.0
"""Helpers for nested dicts and lists, kept for programs that import them."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

__all__ = [
    "compare_namespaces", "compare_state_dicts_and_get_new_values", "dict_list_map_inplace",
    "dict_list_map_outplace", "dict_map", "dict_map_with_key", "diff", "extract_matching_values",
    "inspect_types", "map_reduce", "merge", "merge_namespace_changes", "merge_namespaces_",
    "merge_state_dicts_", "nested_items_iter", "nested_values",
]  # fmt: skip


Path = tuple[Any, ...]

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


def extract_matching_values(
    x: Any, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Any, Any]:
    """Split a nested dict or list by its leaves.

    Args:
        x: a dict or a list, nested to any depth.
        predicate: asked about every leaf.
        return_lists_as_dicts: return parts of lists as dicts by index, so that they keep their
            place; otherwise they are shorter lists.

    Returns:
        (matching, rest), of the same form as `x`; branches without leaves of the one kind are left
        out, except that what was empty in `x` is part of the rest.

    Raises:
        TypeError: `x` is neither dict nor list.
    """
    if not isinstance(x, (dict, list)):
        raise TypeError(f"a dict or a list is needed, not {type(x).__name__}")
    matching: dict[Any, Any] = {}
    rest: dict[Any, Any] = {}
    for key, value in _children(x):
        if not isinstance(value, (dict, list)):
            (matching if predicate(value) else rest)[key] = value
            continue
        inner_matching, inner_rest = extract_matching_values(
            value, predicate, return_lists_as_dicts
        )
        if inner_matching:
            matching[key] = inner_matching
        if inner_rest or not value:
            rest[key] = inner_rest
    if isinstance(x, list) and not return_lists_as_dicts:
        return list(matching.values()), list(rest.values())
    return matching, rest


def diff(
    x1: Any, x2: Any, prefix: Path = ()
) -> tuple[list[Path], list[Path], list[tuple[Path, type, type]]]:
    """Compare two nested dicts or lists; `prefix` stands in front of every reported path.

    Returns:
        Paths only in `x1`, paths only in `x2`, and (path, type in x1, type in x2) of leaves that
        differ.

    Example:
        >>> diff({"lr": 0.1, "step": 1}, {"step": 2})
        ([('lr',)], [], [(('step',), <class 'int'>, <class 'int'>)])
    """
    both_dicts = isinstance(x1, dict) and isinstance(x2, dict)
    both_lists = isinstance(x1, list) and isinstance(x2, list)
    if not (both_dicts or both_lists):
        return [], [], [] if _equal(x1, x2) else [(prefix, type(x1), type(x2))]
    left, right = dict(_children(x1)), dict(_children(x2))
    only_left: list[Path] = [(*prefix, key) for key in left if key not in right]
    only_right: list[Path] = [(*prefix, key) for key in right if key not in left]
    mismatch: list[tuple[Path, type, type]] = []
    for key, value in left.items():
        if key in right:
            inner = diff(value, right[key], (*prefix, key))
            only_left += inner[0]
            only_right += inner[1]
            mismatch += inner[2]
    return only_left, only_right, mismatch


def inspect_types(x: Any, prefix: Path = (), indent: int = 4) -> None:
    """Print the tree of keys of `x` and the types of leaves, with `indent` blanks per level.

    `prefix`, the path of `x` in a larger structure, decides how far lines are indented.
    """
    if not isinstance(x, (dict, list)):
        print(_describe(x))  # noqa: T201 - printing is what it is for
        return
    if not prefix:
        print(_describe(x))  # noqa: T201
    margin = " " * (indent * (len(prefix) + 1))
    for key, value in _children(x):
        print(f"{margin}{key}: {_describe(value)}")  # noqa: T201
        if isinstance(value, (dict, list)):
            inspect_types(value, (*prefix, key), indent)


def nested_values(x: Any) -> Iterator[Any]:
    """Yield the leaves of the nested dict or list `x` in order."""
    for _, _, value in nested_items_iter(x):
        yield value


def nested_items_iter(x: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (container, key or index, leaf) for every leaf of `x`, so that it can be replaced."""
    for key, value in _children(x):
        if isinstance(value, (dict, list)):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace every value of the flat dict `d` by `f(value)`, in place."""
    for key, value in list(d.items()):
        d[key] = f(value)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace every value of the flat dict `d` by `f(key, value)`, in place."""
    for key, value in list(d.items()):
        d[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every leaf of the nested dict or list `x` by `f(leaf)`; return `x` itself."""
    if not isinstance(x, (dict, list)):
        return f(x)
    for key, value in list(_children(x)):
        x[key] = dict_list_map_inplace(f, value)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return a copy of the nested dict or list `x` with every leaf replaced by `f(leaf)`."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Any, x2: Any, key: Path = ()) -> Any:
    """Merge `x2` into `x1`, in place, and return `x1`; they may share branches, but no leaf.

    Lists are merged by position and must have the same length. `key` is the path of both in a
    larger structure, for error messages.

    Raises:
        ValueError: a leaf is in both, or lists differ in length; the message names the path.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
        return x1
    if isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(f"lists at {key} have {len(x1)} and {len(x2)} elements")
        for index, value in enumerate(x2):
            x1[index] = merge(x1[index], value, (*key, index))
        return x1
    raise ValueError(
        f"both sides have a value at {key}: {type(x1).__name__} and {type(x2).__name__}"
    )


def map_reduce(
    xs: Iterable[_Item],
    key_fn: Callable[[_Item], _Key],
    value_fn: Callable[[_Item], _Value],
    reduce_fn: Callable[[list[_Value]], _Result],
) -> dict[_Key, _Result]:
    """Group `value_fn(x)` of all `xs` by `key_fn(x)`, and reduce each list with `reduce_fn`.

    Keys are in the order of their appearance.
    """
    groups: defaultdict[_Key, list[_Value]] = defaultdict(list)
    for item in xs:
        groups[key_fn(item)].append(value_fn(item))
    return {key: reduce_fn(values) for key, values in groups.items()}


def _describe(x: Any) -> str:
    size = f" of {len(x)}" if isinstance(x, (dict, list)) else ""
    return type(x).__name__ + size


def _children(x: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(x, Mapping):
        return x.items()
    if isinstance(x, list):
        return enumerate(x)
    raise TypeError(f"a dict or a list is needed, not {type(x).__name__}")


def _equal(x1: Any, x2: Any) -> bool:
    if x1 is x2:
        return True
    if type(x1) is not type(x2):
        return False
    # Arrays and tensors compare by element.
    equal = x1 == x2
    every = getattr(equal, "all", None)
    if every is None:
        return bool(equal)
    return getattr(x1, "shape", None) == getattr(x2, "shape", None) and bool(every())


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
    """Apply `changes`, as `compare_namespaces` returns them, to `ns`; return `ns`."""
    merge_state_dicts_(vars(ns), changes)
    return ns
