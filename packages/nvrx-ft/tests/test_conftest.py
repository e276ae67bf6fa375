# SPDX-License-Identifier: Apache-2.0
"""The fixture that watches over all tests sees what a test leaves behind."""

import os
import socket
import subprocess
import sys
import threading
from multiprocessing import shared_memory

import pytest


@pytest.fixture
def watch(request):
    """The module with the fixture, as pytest loaded it; other packages have one too."""
    own = os.path.join(os.path.dirname(__file__), "conftest.py")
    plugins = request.config.pluginmanager.get_plugins()
    return next(plugin for plugin in plugins if getattr(plugin, "__file__", None) == own)


def _look(watch):
    return {kind: look() for kind, look in watch._KINDS.items()}


def test_child_process_is_seen(watch):
    """A child is reported from its start until it is reaped, as a zombie too."""
    before = _look(watch)
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        [found] = watch._left_behind(before)
        assert f"child processes: {child.pid}" in found
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        [found] = watch._left_behind(before)
        assert "zombie" in found
    finally:
        child.kill()
        child.wait(30)
    assert not watch._left_behind(before)


def test_thread_is_seen(watch):
    """A running thread is reported."""
    before = _look(watch)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left")
    thread.start()
    try:
        [found] = watch._left_behind(before)
        assert "threads" in found
        assert "left" in found
    finally:
        end.set()
        thread.join(30)


def test_socket_is_seen(watch):
    """An open socket is reported."""
    before = _look(watch)
    with socket.socket(socket.AF_UNIX):
        [found] = watch._left_behind(before)
        assert found.startswith("sockets")


def test_shared_memory_is_seen(watch):
    """A name in /dev/shm that carries our number is reported."""
    before = _look(watch)
    memory = shared_memory.SharedMemory(f"nvrx-test-{os.getpid()}", create=True, size=1)
    memory.close()
    try:
        found = watch._left_behind(before)
        assert any(f"shared memory: nvrx-test-{os.getpid()}" in line for line in found)
    finally:
        memory.unlink()
