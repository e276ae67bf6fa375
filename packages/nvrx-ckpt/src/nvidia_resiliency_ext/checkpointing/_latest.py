# SPDX-License-Identifier: Apache-2.0
"""Publish the name of the newest checkpoint, and remove old ones.

The name changes only after the checkpoint that it names is durable, so a kill at any moment leaves
a name that loads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils.os_utils import sync_directory

from ._durable import temporary_name, write_small_file
from ._errors import DamagedCheckpointError
from ._locks import is_being_saved
from ._manifest import METADATA

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_NAME_BYTES = 4096


def publish_latest(tracker: str | os.PathLike[str], name: str, *, link: bool = False) -> None:
    """Let a tracker file, or a symbolic link, name a checkpoint, in one durable step.

    Add it as the last finalize function of a save, on one rank: it is then called only when all
    files of the checkpoint are durable.

    Args:
        tracker: Path of the file or link, beside the checkpoints.
        name: What it is to say: name of the checkpoint's directory, or for a file any text, such as
            the number of the iteration.
        link: Make a symbolic link.

    Raises:
        DamagedCheckpointError: There is a directory of this name beside it, without metadata.
        FileNotFoundError: A link is to be made to a directory that does not exist.
        CheckpointWriteError: The file cannot be written.
        OSError: The link cannot be made.

    Example:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     publish_latest(f"{folder}/latest", "100")
        ...     read_latest(f"{folder}/latest")
        '100'
    """
    path = os.path.abspath(os.fspath(tracker))
    target = os.path.join(os.path.dirname(path), name)
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, METADATA)):
        raise DamagedCheckpointError(target, "it has no metadata, so it is not complete")
    if not link:
        write_small_file(path, os.fsencode(name))
        return
    os.stat(target)
    temporary = temporary_name(path, "link")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(name, temporary)
    os.replace(temporary, path)
    sync_directory(os.path.dirname(path))


def read_latest(tracker: str | os.PathLike[str]) -> str | None:
    """Return the name that a tracker file or link holds; None if there is no tracker.

    Args:
        tracker: Path of the tracker: a symbolic link, or a file with a name of at most 4096 bytes.

    Raises:
        OSError: The tracker exists and cannot be read.
    """
    try:
        return os.readlink(tracker)
    except FileNotFoundError:
        return None
    except OSError:
        with open(tracker, "rb") as file:
            return os.fsdecode(file.read(_MAX_NAME_BYTES)).strip()


def remove_old(
    checkpoints: Sequence[str | os.PathLike[str]], *, keep: int, protect: str | None = None
) -> list[str]:
    """Remove old checkpoints; the newest complete ones stay, whatever else is there.

    A directory without metadata counts for nothing: it may be a save under way, or one that failed.
    It is removed only when a complete checkpoint comes after it. A symbolic link, such as one that
    `publish_latest` makes, is no checkpoint and stays, and so does what it names. What any process
    is saving, up to its last finalize function, stays as well.

    Args:
        checkpoints: Directories, oldest first.
        keep: How many complete ones stay; at least 1.
        protect: Name of one that stays in any case, such as what the tracker names.

    Returns:
        The directories that are gone. One that cannot be removed is not among them; it has no
        metadata any more.

    Raises:
        ValueError: `keep` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: the last complete checkpoint is never removed")
    given = [os.fspath(path) for path in checkpoints]
    paths = [path for path in given if not os.path.islink(path)]
    linked = {os.path.realpath(path) for path in given if os.path.islink(path)}
    complete = [path for path in paths if os.path.exists(os.path.join(path, METADATA))]
    if not complete:
        return []
    oldest_kept = paths.index(complete[-keep:][0])
    removed = []
    for path in paths[:oldest_kept]:
        if protect is not None and os.path.basename(path) == os.path.basename(protect):
            continue
        if os.path.realpath(path) in linked or is_being_saved(path):
            continue
        # From the moment on that the metadata is gone nobody takes the rest for a checkpoint.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(path, METADATA))
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.lexists(path):
            removed.append(path)
    return removed
