# SPDX-License-Identifier: Apache-2.0
"""Messages on Unix sockets: frames, a closed set of types, descriptors, and who the peer is.

It opens no socket and starts no thread. A frame is a 4-byte big-endian length and that many bytes
of JSON, 1 MiB at most; whatever a peer sends, reading it raises `WireError` and nothing else: a
field declared `int` never arrives as a list. An annotation that cannot be checked is refused when
its type is first used.
"""

from __future__ import annotations

import binascii
import collections.abc
import contextlib
import dataclasses
import enum
import json
import math
import os
import socket
import struct
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from .clock import Deadline
from .errors import (
    DeadlineExceededError,
    FrameTooLargeError,
    MalformedFrameError,
    PeerClosedError,
    PeerRefusedError,
    UnknownMessageError,
)

__all__ = [
    "MAX_FRAME_BYTES",
    "FrameReader",
    "MessageSet",
    "PeerCredentials",
    "frame",
    "peer_credentials",
    "receive_message",
    "receive_with_fds",
    "require_same_user",
    "send_message",
    "send_with_fds",
]

MAX_FRAME_BYTES = 1 << 20
"""Largest payload of a frame, in both directions."""

_LENGTH = struct.Struct(">I")

Check = Callable[[object], bool]

_DEEPEST = 32
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 64) - 1
_LONGEST_INT_TEXT = 20
_PLAIN = frozenset((str, bool, type(None)))
_COLLECTIONS: dict[str, type] = {"frozenset": frozenset, "map": dict, "set": set, "tuple": tuple}
_TAGS = frozenset(("bytes", "float", *_COLLECTIONS))
_SPECIAL_FLOATS = frozenset(("inf", "-inf", "nan"))
_CREDENTIALS = struct.Struct("iII")
_FD = struct.Struct("i")


class MessageSet:
    """The closed set of types that one connection may carry; immutable, safe to share.

    Plain values (None, bool, int, float, str, bytes, list, tuple, set, dict) always pass; of
    classes only `types`, dataclasses and enums, by class name, and each field must fit its
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

    Raises:
        TypeError: A type is neither a dataclass nor an enum.
        ValueError: Two of the types have the same name.
    """

    def __init__(self, *types: type) -> None:
        self._by_name: dict[str, type] = {}
        self._checks: dict[type, Mapping[str, Check]] = {}
        for kind in types:
            is_class = isinstance(kind, type)
            if not is_class or not (dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum)):
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
        return self.encode(message)[_LENGTH.size :]

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
            if all(type(key) is str and key != "$" for key in value):
                return {key: self._pack(item, depth - 1) for key, item in value.items()}
            pairs = [[self._pack(each, depth - 1) for each in pair] for pair in value.items()]
            return {"$": "map", "v": pairs}
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
        kind = self._by_name.get(tag)
        if kind is None and tag not in _TAGS:
            raise UnknownMessageError(tag)
        content = "v" if kind is None or issubclass(kind, enum.Enum) else "f"
        if tree.keys() != {"$", content}:
            raise MalformedFrameError(f"a {tag} has no content, or more than one")
        value = tree[content]
        if kind is None:
            return self._unpack_plain(tag, value, depth - 1)
        if issubclass(kind, enum.Enum):
            if not isinstance(value, str) or value not in kind.__members__:
                raise MalformedFrameError(f"a {tag} needs the name of a member")
            return kind.__members__[value]
        if not isinstance(value, dict):
            raise MalformedFrameError(f"a {tag} needs its fields")
        return self._make(kind, {k: self._unpack(v, depth - 1) for k, v in value.items()})

    def _unpack_plain(self, tag: str, value: object, depth: int) -> object:
        if tag == "bytes":
            return _bytes_of(value)
        if tag == "float":
            if not isinstance(value, str) or value not in _SPECIAL_FLOATS:
                raise MalformedFrameError("a special float is none of inf, -inf and nan")
            return float(value)
        unpack = self._unpack_items if tag == "map" else self._unpack
        items = [unpack(item, depth) for item in _list_of(value)]
        try:
            return _COLLECTIONS[tag](items)
        except (TypeError, ValueError) as error:
            # An element or a key cannot be hashed, or the entry of a mapping is no pair.
            raise MalformedFrameError(f"the items make no {tag}: {error}") from error

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

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received `data`; return the payloads of the frames that are complete.

        Raises:
            FrameTooLargeError: A frame's length is over the limit; the connection is lost.
        """
        buffer = self._buffer
        buffer += data
        payloads = []
        position = 0
        while len(buffer) - position >= _LENGTH.size:
            end = position + _LENGTH.size + size_of(buffer, position)
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[position + _LENGTH.size : end]))
            position = end
        del buffer[:position]
        return payloads


def frame(payload: bytes) -> bytes:
    """Return `payload` with its length in front.

    Raises:
        FrameTooLargeError: The payload is larger than 1 MiB.
    """
    _refuse_too_large(len(payload))
    return _LENGTH.pack(len(payload)) + payload


def size_of(data: bytes | bytearray, position: int = 0) -> int:
    """Return the size of the payload behind the length at a position."""
    (size,) = _LENGTH.unpack_from(data, position)
    _refuse_too_large(size)
    return int(size)


def _refuse_too_large(size: int) -> None:
    if size > MAX_FRAME_BYTES:
        raise FrameTooLargeError(size, MAX_FRAME_BYTES)


def _bytes_of(value: object) -> bytes:
    text = value if isinstance(value, str) else "?"
    with contextlib.suppress(ValueError):
        data = binascii.a2b_base64(text)
        if binascii.b2a_base64(data, newline=False) == text.encode("ascii"):
            return data
    raise MalformedFrameError("bytes are not in the canonical form of base64")


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


# Names that an annotation may use although its module imports them for type checkers only.
_NAMES = vars(typing) | vars(collections.abc)


def _resolve(annotation: object, kind: type) -> object:
    if not isinstance(annotation, str):
        return annotation
    # An inherited field means the names of the module that declares it.
    for module in (sys.modules.get(base.__module__) for base in kind.__mro__):
        try:
            # The text is our own source code, never a peer's.
            return eval(annotation, _NAMES | (vars(module) if module else {}))  # noqa: S307
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


@dataclasses.dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who was at the other end of a Unix socket when it was connected, as the kernel says.

    `pid` counts in our namespace, 0: it lives in one that we cannot see; `uid` and `gid` are its
    user and group.
    """

    pid: int
    uid: int
    gid: int


def send_message(
    sock: socket.socket, messages: MessageSet, message: object, timeout_s: float | None
) -> None:
    """Send `message`, one of `messages`, as a frame over `sock`, in `timeout_s` s (None: no limit).

    Raises:
        WireError: The message cannot be encoded, or the peer is gone (`PeerClosedError`).
        DeadlineExceededError: The peer does not read in time; the stream cannot be used after that.
    """
    with _deadline_on(sock, timeout_s) as arm:
        _send_all(sock, messages.encode(message), arm)


def receive_message(sock: socket.socket, messages: MessageSet, timeout_s: float | None) -> object:
    """Receive exactly one of `messages` from `sock` within `timeout_s` s (None: no limit).

    Raises:
        PeerClosedError: The peer closed the connection.
        WireError: The received data is no message of the set.
        DeadlineExceededError: No whole message came in time; the stream cannot be used after that.
    """
    with _deadline_on(sock, timeout_s) as arm:
        size = size_of(_receive_exactly(sock, _LENGTH.size, arm))
        payload = _receive_exactly(sock, size, arm)
    return messages.decode(payload)


def send_with_fds(
    sock: socket.socket, data: bytes, fds: Sequence[int], timeout_s: float | None = None
) -> None:
    """Send `data` over `sock`, with `fds` on its first byte, in `timeout_s` s (None: no limit).

    The descriptors stay open here.

    Raises:
        ValueError: There are no bytes.
        PeerClosedError: The peer is gone.
        DeadlineExceededError: The peer does not read in time.
    """
    if not data:
        raise ValueError("descriptors travel with at least one byte")
    with _deadline_on(sock, timeout_s) as arm:
        arm()
        # Not socket.send_fds and recv_fds: they drop the flags.
        sent = sock.sendmsg([data], rights(fds), socket.MSG_NOSIGNAL)
        _send_all(sock, data[sent:], arm)


def receive_with_fds(
    sock: socket.socket, max_bytes: int, max_fds: int, timeout_s: float | None = None
) -> tuple[bytes, list[int]]:
    """Receive once from `sock`: up to `max_bytes` and `max_fds` descriptors, in `timeout_s` s.

    The caller owns the descriptors; child programs do not inherit them.

    Returns:
        The bytes, empty when the peer has closed the connection, and the descriptors.

    Raises:
        MalformedFrameError: More descriptors or, on a packet socket, more bytes came than fit.
        PeerClosedError: The peer is gone.
        DeadlineExceededError: Nothing came in time.
    """
    with _deadline_on(sock, timeout_s) as arm:
        arm()
        return receive_once(sock, max_bytes, max_fds)


def receive_once(sock: socket.socket, max_bytes: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Receive as `receive_with_fds`, with the socket's own timeout and errors."""
    data, ancillary, flags, _ = sock.recvmsg(
        max_bytes, socket.CMSG_LEN(max_fds * _FD.size), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, packed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = packed[: len(packed) - len(packed) % _FD.size]
            fds += [descriptor for (descriptor,) in _FD.iter_unpack(whole)]
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) > max_fds:
        for descriptor in fds:
            os.close(descriptor)
        raise MalformedFrameError("the peer sent more bytes or descriptors than fit")
    return data, fds


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Return process, user and group at the other end of `sock`, a connected Unix socket."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerCredentials(*_CREDENTIALS.unpack(data))


def require_same_user(sock: socket.socket) -> PeerCredentials:
    """Return the credentials of the peer of `sock` if it runs as our own user.

    Raises:
        PeerRefusedError: The peer is another user; root is no exception.
    """
    peer = peer_credentials(sock)
    own_uid = os.geteuid()
    if peer.uid != own_uid:
        raise PeerRefusedError(peer.pid, peer.uid, own_uid)
    return peer


@contextlib.contextmanager
def _deadline_on(sock: socket.socket, timeout_s: float | None) -> Iterator[Callable[[], None]]:
    """Lend a socket the time that is left of one deadline, then give it its own timeout back."""
    deadline = Deadline.after(timeout_s)
    own_timeout_s = sock.gettimeout()
    try:
        yield lambda: sock.settimeout(deadline.timeout())
    except (TimeoutError, BlockingIOError) as error:
        raise DeadlineExceededError(f"the peer did nothing for {timeout_s} s") from error
    except (BrokenPipeError, ConnectionResetError) as error:
        raise PeerClosedError("the peer is gone") from error
    finally:
        if sock.fileno() >= 0:
            sock.settimeout(own_timeout_s)


def _send_all(sock: socket.socket, data: bytes, arm: Callable[[], None]) -> None:
    remaining = memoryview(data)
    while remaining:
        arm()
        remaining = remaining[sock.send(remaining, socket.MSG_NOSIGNAL) :]


def _receive_exactly(sock: socket.socket, size: int, arm: Callable[[], None]) -> bytes:
    received = bytearray()
    while len(received) < size:
        arm()
        data = sock.recv(min(size - len(received), 1 << 16))
        if not data:
            raise PeerClosedError("the peer closed the connection")
        received += data
    return bytes(received)


def rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """Return the ancillary data by which `sendmsg` sends descriptors."""
    packed = b"".join(_FD.pack(descriptor) for descriptor in fds)
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else []
