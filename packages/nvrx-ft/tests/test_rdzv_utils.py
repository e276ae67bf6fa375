# SPDX-License-Identifier: Apache-2.0
"""Typed reading of rendezvous settings."""

import pytest

from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import (
    rdzv_config_get_as_bool,
    rdzv_config_get_as_float,
    rdzv_config_get_as_int,
)

TRUE = [True, 1, "1", "true", "T", "Yes", "y", " true "]
FALSE = [False, 0, "0", "false", "F", "No", "n"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(v, True) for v in TRUE] + [(v, False) for v in FALSE],
    ids=repr,
)
def test_bool(value, expected):
    """All accepted spellings of a switch."""
    assert rdzv_config_get_as_bool({"key": value}, "key") is expected


@pytest.mark.parametrize("value", ["", "on", "2", 2, -1, 1.0, []], ids=repr)
def test_bad_bool(value):
    """Anything else names the key."""
    with pytest.raises(ValueError, match="setting key="):
        rdzv_config_get_as_bool({"key": value}, "key")


@pytest.mark.parametrize(
    "get", [rdzv_config_get_as_bool, rdzv_config_get_as_int, rdzv_config_get_as_float]
)
def test_absent_keys_give_the_default(get):
    """An absent key, or None, gives the default, which is None unless given."""
    assert get({}, "key") is None
    assert get({"key": None}, "key", 1) == 1


@pytest.mark.parametrize(
    ("value", "expected"), [("30", 30), (30, 30), (30.0, 30), ("-1", -1)], ids=repr
)
def test_int(value, expected):
    """Whole numbers, also as text."""
    assert rdzv_config_get_as_int({"key": value}, "key") == expected


@pytest.mark.parametrize(("value", "expected"), [("0.5", 0.5), (2, 2.0), ("1e3", 1000.0)])
def test_float(value, expected):
    """Numbers, also as text."""
    assert rdzv_config_get_as_float({"key": value}, "key") == expected


@pytest.mark.parametrize("value", ["", "1.5", "one", 1.5, [], float("inf")], ids=repr)
def test_bad_int(value):
    """Anything else names the key."""
    with pytest.raises(ValueError, match=r"setting key=.* is not a whole number"):
        rdzv_config_get_as_int({"key": value}, "key")


@pytest.mark.parametrize("value", ["", "one", []], ids=repr)
def test_bad_float(value):
    """Anything else names the key."""
    with pytest.raises(ValueError, match=r"setting key=.* is not a number"):
        rdzv_config_get_as_float({"key": value}, "key")
