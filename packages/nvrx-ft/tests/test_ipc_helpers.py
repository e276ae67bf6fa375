# SPDX-License-Identifier: Apache-2.0
"""Single objects over sockets and asyncio streams."""

import asyncio
import socket
import struct
import subprocess
import sys
import time

import pytest

from nvidia_resiliency_ext.fault_tolerance import utils
from nvidia_resiliency_ext.fault_tolerance.data import HeartbeatMsg, OkMsg
from nvidia_resiliency_ext.shared_utils.errors import (
    FrameTooLargeError,
    PeerClosedError,
    WireError,
)


@pytest.fixture
def pair():
    """Two connected sockets."""
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(30)
        right.settimeout(30)
        yield left, right


def test_objects_over_a_socket(pair):
    """Objects arrive whole and in order."""
    left, right = pair
    for message in (HeartbeatMsg(1), OkMsg(cfg={"a": 1}), "x" * 100_000):
        utils.write_object_to_ipc_socket(message, left)
        assert utils.read_obj_from_ipc_socket(right) == message


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", PeerClosedError),
        (b"\x00\x00", PeerClosedError),
        (b"\x00\x00\x00\x08half", PeerClosedError),
        (b"\x00\x00\x00\x04nope", WireError),
        (struct.pack(">I", 1 << 31), FrameTooLargeError),
    ],
)
@pytest.mark.parametrize("raise_exc", [False, True])
def test_lost_connections_and_garbage(pair, data, error, raise_exc):
    """What is no object is None, or an error for those who ask for it."""
    left, right = pair
    left.sendall(data)
    left.close()
    if raise_exc:
        with pytest.raises(error):
            utils.read_obj_from_ipc_socket(right, raise_exc=True)
    else:
        assert utils.read_obj_from_ipc_socket(right) is None


def test_recv_all(pair):
    """Exactly as many bytes as wanted are taken, however they come."""
    left, right = pair
    left.sendall(b"abc")
    left.sendall(b"defg")
    assert utils.recv_all(right, 5) == b"abcde"
    left.close()
    with pytest.raises(PeerClosedError, match="2 of 3 bytes"):
        utils.recv_all(right, 3)


@pytest.mark.parametrize("timeout_s", [0.05, 1e-9])
def test_socket_timeouts(pair, timeout_s):
    """The kernel ends a read at the limit; the descriptor stays open."""
    left, right = pair
    right.settimeout(None)
    utils.set_ipc_socket_timeouts(right.fileno(), timeout_s)
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        right.recv(1)
    assert time.monotonic() - began < 60.0
    left.sendall(b"x")
    assert right.recv(1) == b"x"


def test_objects_over_a_stream():
    """The asyncio pair speaks the same frames, and both ways."""

    async def talk():
        left, right = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=left)
        other_reader, other_writer = await asyncio.open_unix_connection(sock=right)
        try:
            await utils.write_obj_to_ipc_stream(HeartbeatMsg(1, {"a": 2}), writer)
            assert await utils.read_obj_from_ipc_stream(other_reader) == HeartbeatMsg(1, {"a": 2})
            await utils.write_obj_to_ipc_stream(OkMsg(), other_writer)
            assert await utils.read_obj_from_ipc_stream(reader) == OkMsg()
            other_writer.write(b"\x00\x00\x00\x04nope")
            with pytest.raises(WireError):
                await utils.read_obj_from_ipc_stream(reader)
            other_writer.close()
            await other_writer.wait_closed()
            with pytest.raises(EOFError):
                await utils.read_obj_from_ipc_stream(reader)
        finally:
            for stream in (writer, other_writer):
                stream.close()
                await stream.wait_closed()

    asyncio.run(talk())


def test_helpers_import_nothing_heavy():
    """Importing the helpers pulls in neither torch nor what else costs start-up time."""
    program = (
        "import sys; import nvidia_resiliency_ext.fault_tolerance.utils;"
        "import nvidia_resiliency_ext.fault_tolerance.ipc_connector;"
        "import nvidia_resiliency_ext.fault_tolerance.progress_tracker;"
        "import nvidia_resiliency_ext.fault_tolerance.timeouts_calc;"
        "heavy = {'torch', 'numpy', 'psutil', 'yaml', 'asyncio', 'multiprocessing', 'subprocess'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert output.strip() == "[]"
