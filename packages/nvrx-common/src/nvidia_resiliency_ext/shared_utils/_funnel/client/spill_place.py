# SPDX-License-Identifier: Apache-2.0
"""Owns the directories that spills lie in: whose each is, its lock, and what ended processes left.

A lock on `stream.json` says that the owner lives; the kernel ends it with the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.os_utils import lock_file, private_dir, remove_tree_at

if TYPE_CHECKING:
    from collections.abc import Iterator


_OWNER = "stream.json"
_LARGEST_OWNER_BYTES = 64 * 1024
_RANDOM_BYTES = 6
_KEY_DIGITS = 32


@dataclass(frozen=True)
class Identity:
    """Whose lines a spill holds; `name` is the client's, for what it leaves behind."""

    name: str
    node_id: str
    path: str
    stream_id: str

    @property
    def key(self) -> str:
        """What the directory's name begins with."""
        text = f"{self.name}\0{self.node_id}\0{self.path}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_KEY_DIGITS]


def make_place(spill_dir: str, identity: Identity) -> tuple[str, int]:
    """Make a directory for a spill; return it and a descriptor with its lock."""
    name = f"{identity.key}-{os.urandom(_RANDOM_BYTES).hex()}"
    path = os.path.join(private_dir(spill_dir), name)
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        # Somebody else left it at this moment and it was empty.
        private_dir(spill_dir)
        os.mkdir(path, 0o700)
    owner, fd = os.path.join(path, _OWNER), -1
    data = json.dumps(vars(identity)).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(owner, flags, 0o600)
        lock_file(fd)
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, "no space left", _OWNER)  # noqa: TRY301 - as of `write`
    except OSError:
        # On a full disk each try would leave one more.
        with contextlib.suppress(OSError):
            if fd >= 0:
                os.close(fd)
                os.unlink(owner)
            os.rmdir(path)
        raise
    return path, fd


def remove_place(path: str, owner_fd: int) -> None:
    """Remove a directory of our own, and the one above when nobody else has files there."""
    parent, name = os.path.split(path)
    with contextlib.suppress(OSError):
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            remove_tree_at(name, directory)
        finally:
            os.close(directory)
    with contextlib.suppress(OSError):
        os.rmdir(parent)
    # Last: as long as the lock is held nobody takes the directory over.
    os.close(owner_fd)


def ownerless(spill_dir: str, key: str = "") -> Iterator[tuple[str, int, Identity]]:
    """Yield what ended processes left, oldest first: directory, descriptor, and whose it was.

    The descriptor has the lock on it and belongs to the caller.
    """
    places = []
    with contextlib.suppress(OSError), os.scandir(spill_dir) as entries:
        for entry in entries:
            if not entry.name.startswith(key) or "-" not in entry.name:
                continue
            status = entry.stat(follow_symlinks=False)
            ours = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
            if stat.S_ISDIR(status.st_mode) and ours:
                places.append((status.st_ctime_ns, entry.path))
    for _, path in sorted(places):
        taken = _take_owner(path)
        if taken is not None and taken[1].key.startswith(key):
            yield path, *taken
        elif taken is not None:
            os.close(taken[0])


def left_behind(spill_dir: str, name: str, node_id: str) -> list[str]:
    """Return the targets for which ended processes of this name left lines, in no other hands."""
    paths = set()
    for _, fd, found in ownerless(spill_dir):
        os.close(fd)
        if (found.name, found.node_id) == (name, node_id):
            paths.add(found.path)
    return sorted(paths)


def _take_owner(path: str) -> tuple[int, Identity] | None:
    """Lock the owner file and read it; None when its owner lives, it is gone or says nothing."""
    try:
        owner = os.path.join(path, _OWNER)
        fd = os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        lock_file(fd)
        found = json.loads(os.pread(fd, _LARGEST_OWNER_BYTES, 0))
        values = [found[name] for name in ("name", "node_id", "path", "stream_id")]
        # Its last owner may have removed it before we had the lock.
        if os.fstat(fd).st_nlink and all(isinstance(value, str) for value in values):
            return fd, Identity(*values)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    os.close(fd)
    return None
