# SPDX-License-Identifier: Apache-2.0
"""Nested dicts and lists: splitting, comparing, mapping and merging."""

from argparse import Namespace
from copy import deepcopy

import pytest

from nvidia_resiliency_ext.fault_tolerance import dict_utils


def is_int(value):
    """The predicate of these tests."""
    return isinstance(value, int)


@pytest.mark.parametrize(
    ("x", "as_dicts", "matching", "rest"),
    [
        ({"a": 1, "b": "x"}, False, {"a": 1}, {"b": "x"}),
        ({"a": {"b": 1, "c": "x"}}, False, {"a": {"b": 1}}, {"a": {"c": "x"}}),
        ({"a": {"b": 1}}, False, {"a": {"b": 1}}, {}),
        ([1, "x", 2], False, [1, 2], ["x"]),
        ([1, "x", 2], True, {0: 1, 2: 2}, {1: "x"}),
        ({"a": ["x", 1]}, True, {"a": {1: 1}}, {"a": {0: "x"}}),
        ([[1], ["x"]], False, [[1]], [["x"]]),
        ({"a": {}, "b": []}, False, {}, {"a": {}, "b": []}),
    ],
)
def test_extract_matching_values(x, as_dicts, matching, rest):
    """Leaves are split by the predicate, branches are kept where they have leaves."""
    before = deepcopy(x)
    assert dict_utils.extract_matching_values(x, is_int, as_dicts) == (matching, rest)
    assert x == before


def test_extract_matching_values_needs_a_container():
    """A leaf alone cannot be split."""
    with pytest.raises(TypeError, match="not int"):
        dict_utils.extract_matching_values(1, is_int)


@pytest.mark.parametrize(
    ("x1", "x2", "expected"),
    [
        ({"a": 1}, {"a": 1}, ([], [], [])),
        ({"a": 1}, {"b": 1}, ([("a",)], [("b",)], [])),
        ({"a": 1}, {"a": 2}, ([], [], [(("a",), int, int)])),
        ({"a": 1}, {"a": "1"}, ([], [], [(("a",), int, str)])),
        ({"a": [1, 2]}, {"a": [1, 3]}, ([], [], [(("a", 1), int, int)])),
        ({"a": [1, 2]}, {"a": [1]}, ([("a", 1)], [], [])),
        ({"a": {"b": 1}}, {"a": [1]}, ([], [], [(("a",), dict, list)])),
        (1, 1, ([], [], [])),
    ],
)
def test_diff(x1, x2, expected):
    """Differences are named by their paths."""
    assert dict_utils.diff(x1, x2) == expected


def test_diff_prefix():
    """Paths begin with the prefix."""
    assert dict_utils.diff({"a": 1}, {}, ("root",)) == ([("root", "a")], [], [])


def test_diff_compares_tensors_by_element():
    """Values that compare by element are equal when all elements are."""
    import torch

    same = {"w": torch.zeros(2)}
    assert dict_utils.diff({"w": torch.zeros(2)}, same) == ([], [], [])
    for other in (torch.ones(2), torch.zeros(1)):
        assert dict_utils.diff({"w": other}, same)[2] == [(("w",), torch.Tensor, torch.Tensor)]


def test_inspect_types(capsys):
    """The tree of types is printed with one line per key."""
    dict_utils.inspect_types({"a": {"b": 1}, "c": ["x"]}, indent=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "dict of 2",
        "  a: dict of 1",
        "    b: int",
        "  c: list of 1",
        "    0: str",
    ]
    dict_utils.inspect_types(1.0)
    assert capsys.readouterr().out == "float\n"


def test_nested_iteration():
    """Leaves come in order, with their containers, so that they can be replaced."""
    x = {"a": 1, "b": [2, {"c": 3}], "d": {}}
    assert list(dict_utils.nested_values(x)) == [1, 2, 3]
    items = list(dict_utils.nested_items_iter(x))
    assert [(key, value) for _, key, value in items] == [("a", 1), (0, 2), ("c", 3)]
    container, key, _ = items[2]
    container[key] = 4
    assert x["b"][1]["c"] == 4


def test_maps():
    """Flat maps change the dict; nested maps reach every leaf, in place or in a copy."""
    flat = {"a": 1, "b": 2}
    dict_utils.dict_map(lambda value: value * 2, flat)
    assert flat == {"a": 2, "b": 4}
    dict_utils.dict_map_with_key(lambda key, value: f"{key}{value}", flat)
    assert flat == {"a": "a2", "b": "b4"}
    nested = {"a": [1, {"b": 2}]}
    copy = dict_utils.dict_list_map_outplace(str, nested)
    assert copy == {"a": ["1", {"b": "2"}]}
    assert nested == {"a": [1, {"b": 2}]}
    inner = nested["a"]
    assert dict_utils.dict_list_map_inplace(str, nested) is nested
    assert nested["a"] is inner
    assert nested == copy


def test_merge():
    """Branches are united; the first argument is changed and returned."""
    x1 = {"a": {"b": 1}, "l": [{"x": 1}, {"y": 2}]}
    x2 = {"a": {"c": 2}, "d": 3, "l": [{"z": 3}, {}]}
    merged = dict_utils.merge(x1, x2)
    assert merged is x1
    assert merged == {"a": {"b": 1, "c": 2}, "d": 3, "l": [{"x": 1, "z": 3}, {"y": 2}]}


@pytest.mark.parametrize(
    ("x1", "x2", "message"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1}}, r"\('a', 'b'\): int and int"),
        ({"a": {}}, {"a": 1}, r"\('a',\): dict and int"),
        ({"a": [1]}, {"a": [1, 2]}, r"\('a',\) have 1 and 2"),
    ],
)
def test_merge_conflicts(x1, x2, message):
    """Common leaves and unequal lists are errors that name the place."""
    with pytest.raises(ValueError, match=message):
        dict_utils.merge(x1, x2)


def test_map_reduce():
    """Items are grouped, mapped and reduced."""
    result = dict_utils.map_reduce([1, 2, 3, 4], lambda x: x % 2, lambda x: x * 10, sum)
    assert result == {1: 40, 0: 60}


def test_state_dicts():
    """New values are found, and merging them gives the new state."""
    current = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    new = {"a": 1, "b": {"c": 5, "d": 3}, "f": {"g": 6}}
    changes = dict_utils.compare_state_dicts_and_get_new_values(current, new)
    assert changes == {"b": {"c": 5}, "f": {"g": 6}}
    assert dict_utils.merge_state_dicts_(current, changes) is current
    assert current == {"a": 1, "b": {"c": 5, "d": 3}, "e": 4, "f": {"g": 6}}


def test_namespaces():
    """Namespaces are compared and merged by attribute."""
    ns1, ns2 = Namespace(a=1, b={"c": 2, "d": 0}), Namespace(a=1, b={"c": 3, "d": 0}, e=4)
    changes = dict_utils.compare_namespaces(ns1, ns2)
    assert changes == {"b": {"c": 3}, "e": 4}
    assert dict_utils.merge_namespace_changes(ns1, changes) is ns1
    assert ns1 == Namespace(a=1, b={"c": 3, "d": 0}, e=4)
    assert dict_utils.merge_namespaces_(ns1, Namespace(a=9)) == Namespace(
        a=9, b={"c": 3, "d": 0}, e=4
    )
