# SPDX-License-Identifier: Apache-2.0
"""Typed reading of the free-form settings that `--rdzv-conf` gives; it knows no setting itself."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

__all__ = ["rdzv_config_get_as_bool", "rdzv_config_get_as_float", "rdzv_config_get_as_int"]

_TRUE: Final = frozenset({"1", "true", "t", "yes", "y"})
_FALSE: Final = frozenset({"0", "false", "f", "no", "n"})

_Number = TypeVar("_Number", int, float)


def rdzv_config_get_as_bool(
    configs: Mapping[str, Any], key: str, default: bool | None = None
) -> bool | None:
    """Return the switch `key` of `configs`; `default` if it is absent or None.

    It is a bool, 1 or 0, or one of `1 true t yes y` / `0 false f no n` in any case.

    Raises:
        ValueError: The value is anything else.

    Example:
        >>> rdzv_config_get_as_bool({"is_host": "yes"}, "is_host")
        True
    """
    value = configs.get(key)
    if value is None:
        return default
    if isinstance(value, (bool, int)):
        if value in (0, 1):
            return bool(value)
    elif isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    raise ValueError(f"rendezvous setting {key}={value!r} is not a switch: use true or false")


def rdzv_config_get_as_int(
    configs: Mapping[str, Any], key: str, default: int | None = None
) -> int | None:
    """Return the whole number `key` of `configs`; `default` if it is absent or None.

    Raises:
        ValueError: The value is no whole number.
    """
    value = configs.get(key)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"rendezvous setting {key}={value!r} is not a whole number")
    return default if value is None else _number(int, key, value, "a whole number")


def rdzv_config_get_as_float(
    configs: Mapping[str, Any], key: str, default: float | None = None
) -> float | None:
    """Return the number `key` of `configs`; `default` if it is absent or None.

    Raises:
        ValueError: The value is no number.
    """
    value = configs.get(key)
    return default if value is None else _number(float, key, value, "a number")


def _number(convert: Callable[[Any], _Number], key: str, value: Any, kind: str) -> _Number:
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"rendezvous setting {key}={value!r} is not {kind}") from None
