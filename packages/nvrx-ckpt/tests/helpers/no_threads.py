# SPDX-License-Identifier: Apache-2.0
"""A system that gives no more threads."""

import threading


def refuse(monkeypatch, name=None, times=-1):
    """Let `Thread.start` fail as it does then, for threads of a name, a number of times."""
    start = threading.Thread.start

    def limited(thread):
        nonlocal times
        if times and (name is None or thread.name == name):
            times -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
