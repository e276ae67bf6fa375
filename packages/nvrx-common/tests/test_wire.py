# SPDX-License-Identifier: Apache-2.0
"""Messages over real sockets, from honest and from hostile peers."""

from __future__ import annotations

import enum
import fcntl
import json
import math
import os
import pickle
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

import pytest

from nvidia_resiliency_ext.shared_utils import wire
from nvidia_resiliency_ext.shared_utils.errors import (
    DeadlineExceededError,
    FrameTooLargeError,
    MalformedFrameError,
    PeerClosedError,
    PeerRefusedError,
    UnknownMessageError,
    WireError,
)
from nvidia_resiliency_ext.shared_utils.wire import (
    MAX_FRAME_BYTES,
    FrameReader,
    MessageSet,
    receive_message,
    receive_with_fds,
    send_message,
    send_with_fds,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

LONG_S = 30.0


class Color(enum.Enum):
    """An enum whose values are no JSON."""

    RED = (1, 2)
    BLUE = b"b"


class Level(enum.IntEnum):
    """An enum that is also a number."""

    LOW = 1
    HIGH = 2


class Bits(enum.Flag):
    """A flag, of which only plain members can travel."""

    A = 1
    B = 2


@dataclass(frozen=True)
class Point:
    """A message inside messages."""

    x: int
    y: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One field of every kind that a message may have."""

    name: str
    rank: int | None = None
    ratio: float = 0.5
    data: bytes = b""
    done: bool = False
    color: Color = Color.RED
    level: Level = Level.LOW
    origin: Point = Point(0)
    points: tuple[Point, ...] = ()
    pair: tuple[int, str] = (0, "")
    names: set[str] = field(default_factory=set)
    frozen: frozenset[int] = frozenset()
    sections: dict[str, float] = field(default_factory=dict)
    table: Mapping[str, list[int]] = field(default_factory=dict)
    series: Sequence[float] = ()
    either: Union[int, str, None] = None  # noqa: UP007
    maybe: Optional[Point] = None  # noqa: UP045
    mode: Literal["a", "b", 3] = "a"
    anything: Any = None
    plain: list = field(default_factory=list)
    derived: int = field(init=False, default=7)


@dataclass(frozen=True)
class Checked:
    """A message that checks itself."""

    count: int

    def __post_init__(self) -> None:
        """Refuse what no honest peer sends."""
        if self.count < 0:
            raise ZeroDivisionError("count must not be negative")


class Unregistered:
    """A class that nobody registered."""


MESSAGES = MessageSet(Report, Point, Color, Level, Bits, Checked)
FULL = Report(
    name="r\u00e4nk \U0001f600\ud800",
    rank=3,
    ratio=math.inf,
    data=bytes(range(256)),
    done=True,
    color=Color.BLUE,
    level=Level.HIGH,
    origin=Point(1, -0.25),
    points=(Point(1), Point(2)),
    pair=(4, "x"),
    names={"a", "b"},
    frozen=frozenset({1, 2}),
    sections={"step": 1.5, "$": 2.0},
    table={"t": [1, 2]},
    series=[1.0, 2, math.pi],
    either="text",
    maybe=Point(5),
    mode=3,
    anything={1: (2, {3}), (4,): None},
    plain=[1, "two", None, [3.0]],
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected stream sockets."""
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def roundtrip(value: object) -> object:
    """Return what arrives of a value."""
    [payload] = FrameReader().feed(MESSAGES.encode(value))
    return MESSAGES.decode(payload)


def random_value(source: random.Random, depth: int) -> object:
    """Return a value of any kind that can travel."""
    leaves = [
        lambda: None,
        lambda: source.random() < 0.5,
        lambda: source.randint(-(2**63), 2**64 - 1),
        lambda: struct.unpack(">d", source.randbytes(8))[0],
        lambda: "".join(map(chr, source.choices(range(0xD800), k=source.randrange(9)))),
        lambda: source.randbytes(source.randrange(9)),
        lambda: source.choice(list(Color)),
        lambda: Point(source.randrange(9), source.random()),
    ]
    if depth == 0:
        return source.choice(leaves)()
    items = [random_value(source, depth - 1) for _ in range(source.randrange(4))]
    keys = [source.choice(["$", "f", "v", "k", 1, 2.5, b"k", (1, "t")]) for _ in items]
    hashable = [item for item in items if not isinstance(item, (list, dict, set, tuple))]
    return source.choice(
        [
            lambda: items,
            lambda: tuple(items),
            lambda: set(hashable),
            lambda: frozenset(hashable),
            lambda: dict(zip(keys, items, strict=True)),
            *leaves,
        ]
    )()


def test_message_with_every_kind_of_field_arrives_as_it_was() -> None:
    """All field types that the codec knows survive, with their exact Python types."""
    arrived = roundtrip(FULL)
    assert arrived == FULL
    assert repr(arrived).split("names")[0] == repr(FULL).split("names")[0]


def test_default_fields_may_be_missing() -> None:
    """A peer that leaves out fields with defaults is understood."""
    assert MESSAGES.decode(b'{"$":"Report","f":{"name":"x"}}') == Report(name="x")


def test_any_value_arrives_as_it_was() -> None:
    """Whatever can be encoded is decoded to an equal value of the same type."""
    source = random.Random(1)
    for _ in range(2000):
        value = random_value(source, 4)
        arrived = roundtrip(value)
        assert repr(arrived) == repr(value) or arrived == value
        assert type(arrived) is type(value)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (Unregistered(), UnknownMessageError),
        ([{"k": Unregistered()}], UnknownMessageError),
        (bytearray(b"x"), UnknownMessageError),
        (print, UnknownMessageError),
        (Point, UnknownMessageError),
        (2**64, MalformedFrameError),
        (-(2**63) - 1, MalformedFrameError),
        (Bits.A | Bits.B, MalformedFrameError),
        ("x" * MAX_FRAME_BYTES, FrameTooLargeError),
    ],
)
def test_what_cannot_travel_is_refused_by_the_sender(value: object, error: type[WireError]) -> None:
    """A value outside the closed set never leaves, and the error says why."""
    with pytest.raises(error):
        MESSAGES.encode(value)


def test_subclass_of_a_registered_type_does_not_travel() -> None:
    """Only the registered class itself passes; a namesake or a subclass would arrive changed."""

    class Point3(Point):
        pass

    namesake = type("Point", (), {})
    for value in (Point3(1), namesake()):
        with pytest.raises(UnknownMessageError):
            MESSAGES.encode(value)


def test_nesting_has_a_limit_in_both_directions() -> None:
    """A value that nests beyond the limit is neither sent nor accepted, and one within it is."""
    value: object = None
    for _ in range(30):
        value = [value]
    assert roundtrip(value) == value
    for _ in range(5):
        value = [value]
    with pytest.raises(MalformedFrameError, match="deeper"):
        MESSAGES.encode(value)
    for opening, closing in (("[", "]"), ('{"a":', "}"), ('{"$":"tuple","v":[', "]}")):
        for depth in (40, 50_000):
            text = opening * depth + "1" + closing * depth
            with pytest.raises(MalformedFrameError):
                MESSAGES.decode(text.encode())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\xfe",
        b"nonsense",
        b"{",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"18446744073709551616",
        b"1" * 100_000,
        b'{"$":null}',
        b'{"$":1}',
        b'{"$":["Point"]}',
        b'{"$":"Point"}',
        b'{"$":"Point","f":[1]}',
        b'{"$":"Point","f":{}}',
        b'{"$":"Point","f":{"x":"1"}}',
        b'{"$":"Point","f":{"x":1.5}}',
        b'{"$":"Point","f":{"x":1,"z":1}}',
        b'{"$":"Point","f":{"x":1},"v":1}',
        b'{"$":"Point","f":{"x":1,"self":1}}',
        b'{"$":"Color","v":"GREEN"}',
        b'{"$":"Color","v":"__class__"}',
        b'{"$":"Color","v":["RED"]}',
        b'{"$":"Color","f":{}}',
        b'{"$":"bytes","v":"?"}',
        b'{"$":"bytes","v":"QQ"}',
        b'{"$":"bytes","v":"QQ==QQ=="}',
        b'{"$":"bytes","v":1}',
        b'{"$":"float","v":"1.0"}',
        b'{"$":"float","v":1}',
        b'{"$":"tuple","v":1}',
        b'{"$":"set","v":[[1]]}',
        b'{"$":"set","v":[{"$":"tuple","v":[[1]]}]}',
        b'{"$":"map","v":[[1]]}',
        b'{"$":"map","v":[[[1],1]]}',
        b'{"$":"map","v":{"a":1}}',
        b'{"$":"Checked","f":{"count":-1}}',
        b'{"$":"Report","f":{"name":"x","derived":8}}',
        b'{"$":"Report","f":{"name":"x","points":[1]}}',
        b'{"$":"Report","f":{"name":"x","pair":{"$":"tuple","v":[1]}}}',
        b'{"$":"Report","f":{"name":"x","sections":{"a":"b"}}}',
        b'{"$":"Report","f":{"name":"x","table":{"a":["b"]}}}',
        b'{"$":"Report","f":{"name":"x","series":"abc"}}',
        b'{"$":"Report","f":{"name":"x","mode":"c"}}',
        b'{"$":"Report","f":{"name":"x","mode":true}}',
        b'{"$":"Report","f":{"name":"x","either":1.5}}',
        b'{"$":"Report","f":{"name":"x","color":"RED"}}',
        b'{"$":"Report","f":{"name":"x","level":1}}',
        pickle.dumps(FULL),
    ],
    ids=lambda payload: repr(payload[:50]),
)
def test_malformed_message_is_refused(payload: bytes) -> None:
    """Bytes that are no message of the right shape raise the one error for that."""
    with pytest.raises(MalformedFrameError):
        MESSAGES.decode(payload)


@pytest.mark.parametrize("name", ["Unregistered", "os.system", "str", "object", "x" * 10_000, ""])
def test_unknown_type_is_refused(name: str) -> None:
    """A type outside the set is never looked up anywhere, whatever it is called."""
    with pytest.raises(UnknownMessageError) as caught:
        MESSAGES.decode(json.dumps({"$": name, "f": {}}).encode())
    assert len(str(caught.value)) < 400


def test_pickle_that_would_run_code_runs_nothing(tmp_path: Path) -> None:
    """A pickled call in a frame is refused, and the call is not made."""
    victim = tmp_path / "made-by-pickle"

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(victim),)

    with pytest.raises(MalformedFrameError):
        MESSAGES.decode(pickle.dumps(Attack()))
    assert not victim.exists()


def test_random_bytes_raise_wire_errors_only() -> None:
    """No sequence of bytes gets more out of the decoder than a WireError."""
    source = random.Random(2)
    alphabet = b'{}[]",:$fv019-+.eE \\u\x00\xff' + b"Pointxy"
    for number in range(5000):
        length = source.randrange(60)
        data = bytes(source.choices(alphabet, k=length)) if number % 2 else source.randbytes(length)
        try:
            MESSAGES.decode(data)
        except WireError:
            continue


def test_mutated_frames_raise_wire_errors_only() -> None:
    """Valid messages with bytes changed, cut out, doubled or swapped never break the reader."""
    source = random.Random(3)
    frames = [MESSAGES.encode(value) for value in (FULL, Point(1, 2.0), Color.RED, Checked(1))]
    survived = 0
    for _ in range(5000):
        data = bytearray(source.choice(frames))
        for _ in range(source.randrange(1, 4)):
            place = source.randrange(len(data))
            end = min(len(data), place + source.randrange(1, 12))
            change = source.randrange(4)
            if change == 0:
                data[place] = source.randrange(256)
            elif change == 1 and len(data) > 20:
                del data[place:end]
            elif change == 2:
                data[place:place] = data[place:end]
            else:
                data[place] = source.choice(b'"{}[]:,$019')
        try:
            for payload in FrameReader().feed(bytes(data)):
                MESSAGES.decode(payload)
                survived += 1
        except WireError:
            continue
    assert survived > 0


def test_message_types_must_be_distinct_dataclasses_or_enums() -> None:
    """A set with a foreign type, a namesake or a reserved name cannot be made."""
    with pytest.raises(TypeError, match="neither"):
        MessageSet(Point, int)
    with pytest.raises(ValueError, match="two message types"):
        MessageSet(Point, enum.Enum("Point", "A"))
    with pytest.raises(ValueError, match="called 'map'"):
        MessageSet(enum.Enum("map", "A"))
    assert isinstance(MessageSet(Point, Point), MessageSet)


def test_annotation_that_no_message_may_have_is_the_programmers_error() -> None:
    """A field that cannot be checked is reported by name and never silently accepted."""

    @dataclass
    class Odd:
        call: Nowhere  # noqa: F821

    with pytest.raises(TypeError, match=r"Odd\.call"):
        MessageSet(Odd).decode(b'{"$":"Odd","f":{"call":1}}')


def test_frames_are_found_however_the_stream_is_cut() -> None:
    """The reader yields the same payloads for every way of cutting the stream into pieces."""
    source = random.Random(4)
    payloads = [source.randbytes(source.choice([0, 1, 5, 300, 70_000])) for _ in range(20)]
    stream = b"".join(map(wire.frame, payloads))
    for largest in (1, 7, 1000, len(stream)):
        reader, found, position = FrameReader(), [], 0
        while position < len(stream):
            size = source.randint(1, largest) if largest > 1 else 1
            found += reader.feed(stream[position : position + size])
            position += size
            if largest == 1 and position > 3000:
                break
        assert found == payloads[: len(found)]
        assert largest == 1 or found == payloads


def test_oversize_frame_is_refused_at_its_length() -> None:
    """A length over the limit is refused before any of its bytes arrive, and again afterwards."""
    reader = FrameReader()
    assert reader.feed(wire.frame(b"x") + b"\x00\x10\x00") == [b"x"]
    with pytest.raises(FrameTooLargeError) as caught:
        reader.feed(b"\x01")
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (MAX_FRAME_BYTES + 1, 1 << 20)
    with pytest.raises(FrameTooLargeError):
        reader.feed(b"")
    with pytest.raises(FrameTooLargeError):
        MESSAGES.decode(b" " * (MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("blocking", [True, False])
def test_messages_cross_a_socket_in_both_modes(
    pair: tuple[socket.socket, socket.socket], blocking: bool
) -> None:
    """Large and small messages cross a socket whose own mode is kept and does not matter."""
    left, right = pair
    left.setblocking(blocking)
    right.setblocking(blocking)
    values = [FULL, "x" * 900_000, None, Point(2)]
    sender = threading.Thread(
        target=lambda: [send_message(left, MESSAGES, value, LONG_S) for value in values]
    )
    sender.start()
    assert [receive_message(right, MESSAGES, LONG_S) for _ in values] == values
    sender.join(LONG_S)
    assert left.getblocking() is right.getblocking() is blocking


def test_silent_peer_costs_the_timeout_and_no_more(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Receiving from a peer that says nothing, or half a frame, ends at the deadline."""
    left, right = pair
    for prefix in (b"", MESSAGES.encode(Point(1))[:7]):
        left.sendall(prefix)
        begin = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            receive_message(right, MESSAGES, 0.05)
        assert 0.05 <= time.monotonic() - begin < LONG_S


def test_slow_bytes_do_not_extend_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    """A peer that trickles bytes cannot keep the receiver beyond its deadline."""
    left, right = pair
    stop = threading.Event()

    def trickle() -> None:
        left.sendall(struct.pack(">I", 100_000))
        while not stop.wait(0.01):
            left.sendall(b"1")

    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        with pytest.raises(DeadlineExceededError):
            receive_message(right, MESSAGES, 0.2)
    finally:
        stop.set()
        sender.join(LONG_S)


def test_peer_that_takes_nothing_costs_the_timeout(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Sending to a peer that does not read ends at the deadline."""
    left, _ = pair
    # One megabyte is more than the kernel keeps for a peer by default.
    with pytest.raises(DeadlineExceededError):
        send_message(left, MESSAGES, "x" * 1_000_000, 0.05)


def test_closed_peer_is_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    """A peer that is gone, before or inside a frame, raises PeerClosedError on both sides."""
    left, right = pair
    left.sendall(MESSAGES.encode(Point(1)) + MESSAGES.encode(Point(2))[:6])
    left.close()
    assert receive_message(right, MESSAGES, LONG_S) == Point(1)
    with pytest.raises(PeerClosedError):
        receive_message(right, MESSAGES, LONG_S)
    with pytest.raises(PeerClosedError):
        send_message(right, MESSAGES, Point(3), LONG_S)


def test_oversize_frame_ends_receiving_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    """The receiver does not wait for, or hold, a frame that is over the limit."""
    left, right = pair
    left.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(FrameTooLargeError):
        receive_message(right, MESSAGES, LONG_S)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_descriptors_arrive_usable_and_private(kind: socket.SocketKind) -> None:
    """Descriptors come with their bytes, refer to the same files, and are closed on exec."""
    left, right = socket.socketpair(socket.AF_UNIX, kind)
    reader, writer = os.pipe()
    with left, right:
        send_with_fds(left, b"hello", [reader, writer], LONG_S)
        data, fds = receive_with_fds(right, 100, 2, LONG_S)
        send_with_fds(left, b"none", [])
        assert receive_with_fds(right, 100, 2, LONG_S) == (b"none", [])
        left.close()
        assert receive_with_fds(right, 100, 2, LONG_S) == (b"", [])
    os.close(reader)
    os.close(writer)
    try:
        assert data == b"hello"
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)
        os.write(fds[1], b"through")
        assert os.read(fds[0], 10) == b"through"
    finally:
        for fd in fds:
            os.close(fd)


def test_too_many_descriptors_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    """A peer that sends more descriptors than agreed leaves none of them open here."""
    left, right = pair
    reader, writer = os.pipe()
    for allowed in (0, 1, 4):
        send_with_fds(left, b"x", [reader] * 10, LONG_S)
        with pytest.raises(MalformedFrameError):
            receive_with_fds(right, 100, allowed, LONG_S)
    os.close(reader)
    # The last reader is gone; what other threads have open does not matter.
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"x")
    os.close(writer)


def test_descriptors_wait_for_nobody_forever(pair: tuple[socket.socket, socket.socket]) -> None:
    """Receiving descriptors has a deadline too, also one of zero for an event loop."""
    _, right = pair
    right.setblocking(False)
    for timeout_s in (0, 0.05):
        with pytest.raises(DeadlineExceededError):
            receive_with_fds(right, 100, 2, timeout_s)
    assert right.gettimeout() == 0.0


def test_large_data_with_descriptors_arrives_whole(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Bytes beyond what the socket takes at once follow, with the descriptors at their front."""
    left, right = pair
    data = os.urandom(900_000)
    sender = threading.Thread(target=send_with_fds, args=(left, data, [0], LONG_S))
    sender.start()
    received, fds = receive_with_fds(right, 65536, 1, LONG_S)
    while len(received) < len(data):
        more, none = receive_with_fds(right, 65536, 1, LONG_S)
        received += more
        assert none == []
    sender.join(LONG_S)
    for fd in fds:
        os.close(fd)
    assert (received == data, len(fds)) == (True, 1)


def test_descriptors_need_a_byte(pair: tuple[socket.socket, socket.socket]) -> None:
    """Descriptors without data would silently be lost on a stream, so that is refused."""
    with pytest.raises(ValueError, match="at least one byte"):
        send_with_fds(pair[0], b"", [0])


def test_kernel_names_the_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials are those of the process that connected, as the kernel says."""
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        monkeypatch.chdir(tmp_path)  # the path of a socket has 107 bytes
        server.bind("s")
        server.listen()
        client.connect("s")
        accepted, _ = server.accept()
        with accepted:
            peer = wire.require_same_user(accepted)
            assert peer == wire.PeerCredentials(os.getpid(), os.geteuid(), os.getegid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change into another user")
def test_other_user_is_refused() -> None:
    """A peer that runs as another user is refused, and the error names it."""
    left, right = socket.socketpair()
    with left, right:
        # The pair remembers who made it; evaluated by somebody else it is foreign.
        os.seteuid(12345)
        try:
            with pytest.raises(PeerRefusedError) as caught:
                wire.require_same_user(right)
        finally:
            os.seteuid(0)
    assert (caught.value.uid, caught.value.own_uid) == (0, 12345)
