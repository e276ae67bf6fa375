# SPDX-License-Identifier: Apache-2.0
"""Messages as bytes, and checks made from annotations: does a decoded value fit its field?

Messages come from peers, so a field declared `int` must not arrive as a list. It knows the
annotations that messages use and refuses others when the type is first used.
"""

from __future__ import annotations

import binascii
import collections.abc
import dataclasses
import enum
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from nvidia_resiliency_ext.shared_utils.errors import MalformedFrameError, UnknownMessageError

Check = Callable[[object], bool]


def field_checks(kind: type) -> Mapping[str, Check]:
    """Return a check for each field of a dataclass that its constructor takes."""
    checks = {}
    for field in dataclasses.fields(kind):
        if field.init:
            try:
                checks[field.name] = _check(_resolve(field.type, kind))
            except TypeError as error:
                raise TypeError(f"field {kind.__name__}.{field.name}: {error}") from error
    return checks


class _Names(dict[str, object]):
    """Names that an annotation may use although its module imports them for type checkers only."""

    def __missing__(self, name: str) -> object:
        for module in (collections.abc, typing):
            if hasattr(module, name):
                value: object = getattr(module, name)
                return value
        raise KeyError(name)


def _resolve(annotation: object, kind: type) -> object:
    if not isinstance(annotation, str):
        return annotation
    # An inherited field means the names of the module that declares it.
    modules = (sys.modules.get(base.__module__) for base in kind.__mro__)
    for module in modules:
        try:
            # The text is our own source code, never a peer's.
            return eval(annotation, {}, _Names(vars(module) if module else {}))  # noqa: S307
        except NameError:
            continue
    raise TypeError(f"annotation {annotation!r} names something unknown")


def _check(annotation: object) -> Check:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if annotation in (typing.Any, object):
        return lambda _: True
    if annotation in (None, type(None)):
        return lambda value: value is None
    if origin in (typing.Union, types.UnionType):
        choices = [_check(argument) for argument in arguments]
        return lambda value: any(choice(value) for choice in choices)
    if origin is typing.Literal:
        return lambda value: any(
            type(value) is type(allowed) and value == allowed for allowed in arguments
        )
    return _check_class(origin if origin is not None else annotation, arguments)


def _check_class(kind: object, arguments: tuple[object, ...]) -> Check:
    if not isinstance(kind, type):
        raise TypeError(f"no message can hold {kind!r}")
    if kind is float:
        # As type checkers have it, an integer is a float.
        return lambda value: isinstance(value, (float, int))
    if kind is tuple and arguments:
        return _check_tuple(arguments)
    if issubclass(kind, collections.abc.Mapping) and arguments:
        key, item = (_check(argument) for argument in arguments)
        return lambda value: (
            isinstance(value, kind)
            and isinstance(value, dict)
            and all(key(k) and item(v) for k, v in value.items())
        )
    if issubclass(kind, collections.abc.Iterable) and len(arguments) == 1:
        element = _check(arguments[0])
        return lambda value: (
            isinstance(value, kind)
            and isinstance(value, (list, tuple, set, frozenset))
            and all(element(v) for v in value)
        )
    return lambda value: isinstance(value, kind)


def _check_tuple(arguments: tuple[object, ...]) -> Check:
    if len(arguments) == 2 and arguments[1] is Ellipsis:  # noqa: PLR2004
        every = _check(arguments[0])
        return lambda value: isinstance(value, tuple) and all(every(v) for v in value)
    each = [_check(argument) for argument in arguments if argument != ()]
    return lambda value: (
        isinstance(value, tuple)
        and len(value) == len(each)
        and all(check(v) for check, v in zip(each, value, strict=True))
    )


_DEEPEST = 32
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 64) - 1
_LONGEST_INT_TEXT = 20
_RESERVED = frozenset(("bytes", "float", "frozenset", "map", "set", "tuple"))
_SPECIAL_FLOATS = frozenset(("inf", "-inf", "nan"))


class Codec:
    """Turns values of a closed set of types into JSON text and back; immutable after it is made.

    Args:
        types: Dataclasses and enums that may appear anywhere in a message.
    """

    def __init__(self, types: tuple[type, ...]) -> None:
        self._by_name: dict[str, type] = {}
        self._checks: dict[type, Mapping[str, Check]] = {}
        for kind in types:
            if not _is_message_type(kind):
                raise TypeError(f"{kind!r} is neither a dataclass nor an enum")
            if kind.__name__ in _RESERVED or self._by_name.get(kind.__name__, kind) is not kind:
                raise ValueError(f"two message types are called {kind.__name__!r}")
            self._by_name[kind.__name__] = kind
        self._packers: dict[type, Callable[[Any, int], object]] = {
            int: self._pack_int,
            float: lambda v, _: v if math.isfinite(v) else {"$": "float", "v": str(v)},
            bytes: lambda v, _: {"$": "bytes", "v": binascii.b2a_base64(v, newline=False).decode()},
            list: self._pack_all,
            tuple: lambda v, depth: {"$": "tuple", "v": self._pack_all(v, depth)},
            set: self._pack_set,
            frozenset: self._pack_set,
            dict: self._pack_dict,
        }
        self._unpackers: dict[str, Callable[[object, int], object]] = {
            "bytes": self._unpack_bytes,
            "float": self._unpack_float,
            "frozenset": lambda v, depth: frozenset(self._unpack_hashable(v, depth)),
            "map": self._unpack_map,
            "set": lambda v, depth: set(self._unpack_hashable(v, depth)),
            "tuple": lambda v, depth: tuple(self._unpack_items(v, depth)),
        }

    def dumps(self, value: object) -> bytes:
        """Return the JSON text of a value."""
        return _ENCODER.encode(self._pack(value, _DEEPEST)).encode("ascii")

    def loads(self, data: bytes) -> object:
        """Return the value of a JSON text from an untrusted peer."""
        try:
            tree = _DECODER.decode(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise MalformedFrameError(f"not a JSON message: {error}") from error
        return self._unpack(tree, _DEEPEST)

    def _pack(self, value: object, depth: int) -> object:
        if depth == 0:
            raise MalformedFrameError(f"a message nests deeper than {_DEEPEST} levels")
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind.__name__ in self._by_name and self._by_name[kind.__name__] is kind:
            return self._pack_registered(value, depth)
        packer = self._packers.get(kind)
        if packer is None:
            raise UnknownMessageError(kind.__qualname__)
        return packer(value, depth - 1)

    def _pack_registered(self, value: object, depth: int) -> object:
        name = type(value).__name__
        if isinstance(value, enum.Enum):
            if type(value).__members__.get(value.name or "") is not value:
                raise MalformedFrameError(f"{value!r} is a combination and not a member")
            return {"$": name, "v": value.name}
        fields = {
            field.name: self._pack(getattr(value, field.name), depth - 1)
            for field in dataclasses.fields(value)  # type: ignore[arg-type]  # checked in __init__
            if field.init
        }
        return {"$": name, "f": fields}

    def _unpack(self, tree: object, depth: int) -> object:
        if depth == 0:
            raise MalformedFrameError(f"a message nests deeper than {_DEEPEST} levels")
        if isinstance(tree, dict):
            tag = tree.get("$")
            if tag is not None:
                return self._unpack_tagged(tag, tree, depth)
            if "$" in tree:
                raise MalformedFrameError("a tagged value has no name")
            return {key: self._unpack(item, depth - 1) for key, item in tree.items()}
        if isinstance(tree, list):
            return [self._unpack(item, depth - 1) for item in tree]
        if isinstance(tree, float) and not math.isfinite(tree):
            raise MalformedFrameError("a number is out of range")
        return tree

    def _unpack_tagged(self, tag: object, tree: dict[str, object], depth: int) -> object:
        if not isinstance(tag, str):
            raise MalformedFrameError("the name of a tagged value is no string")
        if tag in self._unpackers:
            if tree.keys() != {"$", "v"}:
                raise MalformedFrameError(f"a tagged {tag} has no value, or more than one")
            return self._unpackers[tag](tree["v"], depth - 1)
        kind = self._by_name.get(tag)
        if kind is None:
            raise UnknownMessageError(tag)
        if issubclass(kind, enum.Enum):
            member = tree.get("v")
            if tree.keys() != {"$", "v"} or not isinstance(member, str):
                raise MalformedFrameError(f"a {tag} needs the name of a member")
            if member not in kind.__members__:
                raise MalformedFrameError(f"{tag} has no member {member[:100]!r}")
            return kind.__members__[member]
        fields = tree.get("f")
        if tree.keys() != {"$", "f"} or not isinstance(fields, dict):
            raise MalformedFrameError(f"a {tag} needs its fields")
        return self._make(kind, {k: self._unpack(v, depth - 1) for k, v in fields.items()})

    def _make(self, kind: type, values: dict[str, object]) -> object:
        if kind not in self._checks:
            self._checks[kind] = field_checks(kind)
        checks = self._checks[kind]
        for name, value in values.items():
            check = checks.get(name)
            if check is None:
                raise MalformedFrameError(f"{kind.__name__} has no field {name[:100]!r}")
            if not check(value):
                given = type(value).__name__
                raise MalformedFrameError(f"{kind.__name__}.{name} cannot be a {given}")
        try:
            return kind(**values)
        except Exception as error:
            # A missing field, or the type's own validation: whatever it raises is about the peer.
            raise MalformedFrameError(f"{kind.__name__} refuses its fields: {error}") from error

    def _pack_int(self, value: int, _: int) -> object:
        if not _SMALLEST_INT <= value <= _LARGEST_INT:
            raise MalformedFrameError("an integer has more than 64 bits")
        return value

    def _pack_all(self, value: Iterable[object], depth: int) -> list[object]:
        return [self._pack(item, depth) for item in value]

    def _pack_set(self, value: set[object], depth: int) -> object:
        return {"$": type(value).__name__, "v": self._pack_all(value, depth)}

    def _pack_dict(self, value: dict[object, object], depth: int) -> object:
        if all(type(key) is str and key != "$" for key in value):
            return {key: self._pack(item, depth) for key, item in value.items()}
        pairs = [self._pack_all(pair, depth) for pair in value.items()]
        return {"$": "map", "v": pairs}

    def _unpack_bytes(self, value: object, _: int) -> object:
        text = value if isinstance(value, str) else "?"
        try:
            data = binascii.a2b_base64(text)
        except ValueError as error:
            raise MalformedFrameError("bytes are not in base64") from error
        if binascii.b2a_base64(data, newline=False) != text.encode("ascii"):
            raise MalformedFrameError("bytes are not in the canonical form of base64")
        return data

    def _unpack_float(self, value: object, _: int) -> object:
        if not isinstance(value, str) or value not in _SPECIAL_FLOATS:
            raise MalformedFrameError("a special float is none of inf, -inf and nan")
        return float(value)

    def _unpack_items(self, value: object, depth: int) -> list[object]:
        if not isinstance(value, list):
            raise MalformedFrameError("a collection has no list of items")
        return [self._unpack(item, depth) for item in value]

    def _unpack_hashable(self, value: object, depth: int) -> list[object]:
        return _hashable(self._unpack_items(value, depth))

    def _unpack_map(self, value: object, depth: int) -> object:
        if not isinstance(value, list):
            raise MalformedFrameError("a mapping has no list of pairs")
        pairs = [self._unpack_items(pair, depth) for pair in value]
        if any(len(pair) != 2 for pair in pairs):  # noqa: PLR2004
            raise MalformedFrameError("a mapping has an entry that is no pair")
        keys = _hashable([key for key, _ in pairs])
        return dict(zip(keys, (item for _, item in pairs), strict=True))


def _is_message_type(kind: object) -> bool:
    if not isinstance(kind, type):
        return False
    return dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum)


def _hashable(items: list[object]) -> list[object]:
    try:
        for item in items:
            hash(item)
    except TypeError as error:
        raise MalformedFrameError("an element of a set, or a key, cannot be hashed") from error
    return items


def _parse_int(text: str) -> int:
    # Python needs quadratic time for long numbers.
    number = int(text) if len(text) <= _LONGEST_INT_TEXT else _LARGEST_INT + 1
    if not _SMALLEST_INT <= number <= _LARGEST_INT:
        raise ValueError("an integer has more than 64 bits")
    return number


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


_PLAIN = frozenset((str, bool, type(None)))
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_constant=_refuse_constant)
