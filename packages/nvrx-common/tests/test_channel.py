# SPDX-License-Identifier: Apache-2.0
"""Channels never block, keep a bound, and are strict about what they take."""

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import pytest

from nvidia_resiliency_ext.shared_utils.unix_sockets import MAX_WAITING, Channel
from nvidia_resiliency_ext.shared_utils.wire import MessageSet


@dataclass
class HangFound:
    report: dict[str, Any]


@dataclass
class LogLine:
    level: int
    text: str


@dataclass
class CycleChanged:
    cycle: int


LAUNCHER_MESSAGES = MessageSet(HangFound, LogLine, CycleChanged)


@pytest.fixture
def pair():
    """Return two ends of a socketpair as channels."""
    ends = [Channel(end, LAUNCHER_MESSAGES) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def drain(channel, other):
    """Let both ends work until nothing moves."""
    received = []
    while True:
        more = channel.receive()
        received += more
        other.flush()
        if not more and not other.wants_to_write:
            return received


def test_a_peer_that_does_not_read_costs_only_droppable_lines(pair):
    """Sending to a stuck peer returns at once, keeps a bound, and keeps what matters."""
    sender, receiver = pair
    started = time.monotonic()
    for number in range(100):
        sender.send(HangFound({"n": number}))
        for _ in range(40):
            sender.send(LogLine(20, "x" * 500), is_droppable=True)
    assert time.monotonic() - started < 20.0
    assert len(sender._waiting) <= MAX_WAITING
    received = drain(receiver, sender)
    hangs = [message.report["n"] for message in received if isinstance(message, HangFound)]
    assert hangs == list(range(100))
    assert len(received) < 4100


def test_descriptors_arrive_with_their_message_and_in_order(pair):
    """Each message's descriptors can be taken when the message is returned."""
    sender, receiver = pair
    pipes = [os.pipe() for _ in range(3)]
    for number, (_, write_fd) in enumerate(pipes):
        sender.send(CycleChanged(number), [write_fd])
        os.close(write_fd)
    assert [m.cycle for m in receiver.receive()] == [0, 1, 2]
    for read_fd, _ in pipes:
        [fd] = receiver.take_fds(1)
        os.write(fd, b"x")
        os.close(fd)
        assert os.read(read_fd, 2) == b"x"
        os.close(read_fd)


def test_descriptors_that_nobody_takes_are_closed(pair):
    """Closing a channel closes what a peer smuggled in."""
    sender, receiver = pair
    read_fd, write_fd = os.pipe()
    sender.send(CycleChanged(1), [write_fd])
    os.close(write_fd)
    receiver.receive()
    receiver.close()
    assert os.read(read_fd, 1) == b"", "no copy of the writing end is open any more"
    os.close(read_fd)


def test_messages_before_garbage_are_returned(pair):
    """What came before a malformed frame counts; then the channel is over."""
    sender, receiver = pair
    sender.send(CycleChanged(1))
    sender.sock.send(b"\x00\x00\x00\x03{]}")
    assert receiver.receive() == [CycleChanged(1)]
    assert receiver.is_over


def test_a_channel_that_ends_when_full_drops_nothing_before():
    """A peer that never reads ends the channel after 16 MiB; what it reads then is in order."""
    ours, theirs = socket.socketpair()
    sender = Channel(ours, LAUNCHER_MESSAGES, ends_when_full=True)
    receiver = Channel(theirs, LAUNCHER_MESSAGES)
    sent = 0
    while not sender.is_over:
        sender.send(LogLine(sent, "x" * 500_000))
        sent += 1
        assert sent < 100
    assert sent > 16 << 20 >> 19
    first = receiver.receive()
    assert [message.level for message in first] == list(range(len(first)))
    sender.close()
    receiver.close()


def test_messages_before_the_end_are_read_after_a_failed_send(pair):
    """A peer that said goodbye and is gone is still heard when an answer to it failed."""
    sender, receiver = pair
    sender.send(CycleChanged(7))
    sender.close()
    receiver.send(CycleChanged(1))
    receiver.send(CycleChanged(2))
    assert receiver.is_over
    assert receiver.receive() == [CycleChanged(7)]


def test_more_descriptors_than_allowed_end_the_channel():
    """A peer cannot fill our table of descriptors."""
    ours, theirs = socket.socketpair()
    sender = Channel(ours, LAUNCHER_MESSAGES)
    receiver = Channel(theirs, LAUNCHER_MESSAGES, max_fds=1)
    with open(os.devnull) as file:
        for number in range(3):
            sender.send(CycleChanged(number), [file.fileno()])
            receiver.receive()
    assert receiver.is_over
    receiver.close()
    sender.close()
