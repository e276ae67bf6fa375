# SPDX-License-Identifier: Apache-2.0
"""Messages as bytes: closed sets of types, each value checked against its annotation, and frames.

A message comes from a peer, so a field declared `int` must not arrive as a list. An annotation that
cannot be checked is refused when its type is first used.
"""

from __future__ import annotations

import binascii
import collections.abc
import dataclasses
import enum
import json
import math
import struct
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from nvidia_resiliency_ext.shared_utils.errors import (
    FrameTooLargeError,
    MalformedFrameError,
    UnknownMessageError,
)

MAX_FRAME_BYTES = 1 << 20
"""Largest payload of a frame, in both directions."""

LENGTH = struct.Struct(">I")

Check = Callable[[object], bool]

_DEEPEST = 32
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 64) - 1
_LONGEST_INT_TEXT = 20
_PLAIN = frozenset((str, bool, type(None)))
_COLLECTIONS: dict[str, type] = {"frozenset": frozenset, "set": set, "tuple": tuple}
_TAGS = frozenset(("bytes", "float", "map", *_COLLECTIONS))
_SPECIAL_FLOATS = frozenset(("inf", "-inf", "nan"))


class MessageSet:
    """The closed set of types that one connection may carry; immutable, safe to share.

    Plain values (None, bool, int, float, str, bytes, list, tuple, set, dict) always pass; of
    classes only the registered dataclasses and enums, by class name, and each field must fit its
    annotation. Names of extensions and code never travel.

    Example:
        >>> from nvidia_resiliency_ext.shared_utils.wire import FrameReader, MessageSet
        >>> @dataclasses.dataclass(frozen=True)
        ... class CycleChanged:
        ...     cycle: int
        >>> messages = MessageSet(CycleChanged)
        >>> [payload] = FrameReader().feed(messages.encode(CycleChanged(cycle=3)))
        >>> messages.decode(payload)
        CycleChanged(cycle=3)

    Args:
        types: Dataclasses and enums.

    Raises:
        TypeError: A type is neither a dataclass nor an enum.
        ValueError: Two of the types have the same name.
    """

    def __init__(self, *types: type) -> None:
        self._by_name: dict[str, type] = {}
        self._checks: dict[type, Mapping[str, Check]] = {}
        for kind in types:
            if not _is_message_type(kind):
                raise TypeError(f"{kind!r} is neither a dataclass nor an enum")
            name = kind.__name__
            if name in _TAGS or self._by_name.setdefault(name, kind) is not kind:
                raise ValueError(f"two message types are called {name!r}")

    def encode(self, message: object) -> bytes:
        """Return the frame of `message` for a stream: length and payload.

        Raises:
            UnknownMessageError: The message holds an object of a type that is not in the set.
            MalformedFrameError: The message nests too deeply, or an integer has more than 64 bits.
            FrameTooLargeError: The message needs more than 1 MiB.
        """
        return frame(_ENCODER.encode(self._pack(message, _DEEPEST)).encode("ascii"))

    def encode_payload(self, message: object) -> bytes:
        """Return the payload of `message`, for sockets that keep messages apart.

        Raises:
            WireError: As for `encode`.
        """
        return self.encode(message)[LENGTH.size :]

    def decode(self, payload: bytes) -> object:
        """Return the message of `payload`, the bytes after the length.

        Raises:
            UnknownMessageError: The payload names a type that is not in the set.
            FrameTooLargeError: The payload is larger than 1 MiB.
            MalformedFrameError: The payload is wrong in any other way.
        """
        _refuse_too_large(len(payload))
        try:
            tree = _DECODER.decode(payload.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise MalformedFrameError(f"not a JSON message: {error}") from error
        return self._unpack(tree, _DEEPEST)

    def _pack(self, value: Any, depth: int) -> object:
        if depth == 0:
            raise MalformedFrameError(f"a message nests deeper than {_DEEPEST} levels")
        kind = type(value)
        if kind in _PLAIN:
            return value
        if self._by_name.get(kind.__name__) is kind:
            return self._pack_registered(value, depth)
        if kind is int:
            if not _SMALLEST_INT <= value <= _LARGEST_INT:
                raise MalformedFrameError("an integer has more than 64 bits")
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "v": str(value)}
        if kind is bytes:
            return {"$": "bytes", "v": binascii.b2a_base64(value, newline=False).decode()}
        if kind is dict:
            return self._pack_dict(value, depth - 1)
        if kind is not list and _COLLECTIONS.get(kind.__name__) is not kind:
            raise UnknownMessageError(kind.__qualname__)
        items = [self._pack(item, depth - 1) for item in value]
        return items if kind is list else {"$": kind.__name__, "v": items}

    def _pack_registered(self, value: Any, depth: int) -> object:
        name = type(value).__name__
        if isinstance(value, enum.Enum):
            if type(value).__members__.get(value.name or "") is not value:
                raise MalformedFrameError(f"{value!r} is a combination and not a member")
            return {"$": name, "v": value.name}
        fields = {
            field.name: self._pack(getattr(value, field.name), depth - 1)
            for field in dataclasses.fields(value)
            if field.init
        }
        return {"$": name, "f": fields}

    def _pack_dict(self, value: dict[object, object], depth: int) -> object:
        if all(type(key) is str and key != "$" for key in value):
            return {key: self._pack(item, depth) for key, item in value.items()}
        pairs = [[self._pack(each, depth) for each in pair] for pair in value.items()]
        return {"$": "map", "v": pairs}

    def _unpack(self, tree: object, depth: int) -> object:
        if depth == 0:
            raise MalformedFrameError(f"a message nests deeper than {_DEEPEST} levels")
        if isinstance(tree, dict):
            if "$" in tree:
                return self._unpack_tagged(tree, depth)
            return {key: self._unpack(item, depth - 1) for key, item in tree.items()}
        if isinstance(tree, list):
            return [self._unpack(item, depth - 1) for item in tree]
        if isinstance(tree, float) and not math.isfinite(tree):
            raise MalformedFrameError("a number is out of range")
        return tree

    def _unpack_tagged(self, tree: dict[str, object], depth: int) -> object:
        tag = tree["$"]
        if not isinstance(tag, str):
            raise MalformedFrameError("the name of a tagged value is no string")
        if tag in _TAGS:
            if tree.keys() != {"$", "v"}:
                raise MalformedFrameError(f"a tagged {tag} has no value, or more than one")
            return self._unpack_plain(tag, tree["v"], depth - 1)
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

    def _unpack_plain(self, tag: str, value: object, depth: int) -> object:
        if tag == "bytes":
            return _bytes_of(value)
        if tag == "float":
            if not isinstance(value, str) or value not in _SPECIAL_FLOATS:
                raise MalformedFrameError("a special float is none of inf, -inf and nan")
            return float(value)
        make: Callable[[Any], object]
        if tag == "map":
            make, items = dict, [self._unpack_items(pair, depth) for pair in _list_of(value)]
            if any(len(pair) != 2 for pair in items):  # noqa: PLR2004
                raise MalformedFrameError("a mapping has an entry that is no pair")
        else:
            make, items = _COLLECTIONS[tag], self._unpack_items(value, depth)
        try:
            return make(items)
        except TypeError as error:
            raise MalformedFrameError("an element of a set, or a key, cannot be hashed") from error

    def _unpack_items(self, value: object, depth: int) -> list[Any]:
        return [self._unpack(item, depth) for item in _list_of(value)]

    def _make(self, kind: type, values: dict[str, object]) -> object:
        if kind not in self._checks:
            self._checks[kind] = _field_checks(kind)
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


class FrameReader:
    """Cuts a stream into frames, for one connection; it holds at most one unfinished frame."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received `data`; return the payloads of the frames that are complete.

        Raises:
            FrameTooLargeError: A frame's length is over the limit; the connection cannot be used
                after that.
        """
        buffer = self._buffer
        buffer += data
        payloads = []
        position = 0
        while len(buffer) - position >= LENGTH.size:
            end = position + LENGTH.size + size_of(buffer, position)
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[position + LENGTH.size : end]))
            position = end
        del buffer[:position]
        return payloads


def frame(payload: bytes) -> bytes:
    """Return `payload` with its length in front.

    Raises:
        FrameTooLargeError: The payload is larger than 1 MiB.
    """
    _refuse_too_large(len(payload))
    return LENGTH.pack(len(payload)) + payload


def size_of(data: bytes | bytearray, position: int = 0) -> int:
    """Return the size of the payload behind the length at a position."""
    (size,) = LENGTH.unpack_from(data, position)
    _refuse_too_large(size)
    return int(size)


def _refuse_too_large(size: int) -> None:
    if size > MAX_FRAME_BYTES:
        raise FrameTooLargeError(size, MAX_FRAME_BYTES)


def _is_message_type(kind: object) -> bool:
    if not isinstance(kind, type):
        return False
    return dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum)


def _bytes_of(value: object) -> bytes:
    text = value if isinstance(value, str) else "?"
    try:
        data = binascii.a2b_base64(text)
    except ValueError as error:
        raise MalformedFrameError("bytes are not in base64") from error
    if binascii.b2a_base64(data, newline=False) != text.encode("ascii"):
        raise MalformedFrameError("bytes are not in the canonical form of base64")
    return data


def _list_of(value: object) -> list[object]:
    if not isinstance(value, list):
        raise MalformedFrameError("a collection has no list of items")
    return value


def _parse_int(text: str) -> int:
    # Python needs quadratic time for long numbers.
    number = int(text) if len(text) <= _LONGEST_INT_TEXT else _LARGEST_INT + 1
    if not _SMALLEST_INT <= number <= _LARGEST_INT:
        raise ValueError("an integer has more than 64 bits")
    return number


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_constant=_refuse_constant)


def _field_checks(kind: type) -> Mapping[str, Check]:
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
    for module in (sys.modules.get(base.__module__) for base in kind.__mro__):
        try:
            # The text is our own source code, never a peer's.
            return eval(annotation, {}, _Names(vars(module) if module else {}))  # noqa: S307
        except NameError:
            continue
    raise TypeError(f"annotation {annotation!r} names something unknown")


def _check(annotation: object) -> Check:
    """Return the check of values for an annotation that `_resolve` has found."""
    arguments = typing.get_args(annotation)
    kind: Any = typing.get_origin(annotation) or annotation
    if kind in (typing.Union, types.UnionType):
        choices = [_check(argument) for argument in arguments]
        return lambda value: any(choice(value) for choice in choices)
    if kind is typing.Literal:
        return lambda value: any(type(value) is type(a) and value == a for a in arguments)
    kind = {typing.Any: object, None: type(None)}.get(kind, kind)
    if not isinstance(kind, type):
        raise TypeError(f"no message can hold {kind!r}")
    if kind is tuple and arguments and Ellipsis not in arguments:
        each = [_check(argument) for argument in arguments if argument != ()]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(each)
            and all(check(v) for check, v in zip(each, value, strict=True))
        )
    if issubclass(kind, collections.abc.Mapping) and arguments:
        key, item = (_check(argument) for argument in arguments)
        return lambda value: (
            isinstance(value, kind)
            and isinstance(value, dict)
            and all(key(k) and item(v) for k, v in value.items())
        )
    elements = [argument for argument in arguments if argument is not Ellipsis]
    if issubclass(kind, collections.abc.Iterable) and len(elements) == 1:
        element = _check(elements[0])
        return lambda value: (
            isinstance(value, kind)
            and isinstance(value, (list, tuple, set, frozenset))
            and all(element(v) for v in value)
        )
    wanted = (float, int) if kind is float else kind  # to type checkers an integer is a float
    return lambda value: isinstance(value, wanted)
