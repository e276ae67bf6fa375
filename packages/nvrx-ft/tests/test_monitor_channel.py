# SPDX-License-Identifier: Apache-2.0
"""The monitor's streams: never blocking, bounded, and strict about what they take."""

import os
import socket
import time

import pytest

from nvidia_resiliency_ext.fault_tolerance._monitor.channel import MAX_WAITING, Channel
from nvidia_resiliency_ext.fault_tolerance._monitor.messages import (
    LAUNCHER_MESSAGES,
    CycleChanged,
    HangFound,
    LogLine,
)


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
