# SPDX-License-Identifier: Apache-2.0
"""Looks whether storage paths are there and can be read; it has no deadline of its own.

A dead mount can hold any of its calls for ever: the storage health check runs this as a program
(``python -S -m nvidia_resiliency_ext.shared_utils.storage_probe -- PATH...``) that it can leave
behind. It imports little, to start fast. A path that cannot be evaluated is reported, never raised.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterable, Sequence

__all__ = ["main"]

_SAMPLE_BYTES = 4096
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})
_USAGE = """\
usage: python -m nvidia_resiliency_ext.shared_utils.storage_probe [--write] [--] PATH...
       python -m nvidia_resiliency_ext.shared_utils.storage_probe --mount [--] PATH

Look whether each absolute PATH is there and can be read. Prints one JSON object with the lists
invalid, missing, unreadable (and unwritable); exit code 1 when one of them is not empty.

  --write  also write, flush and delete a small file in each directory, and open each file for
           writing
  --mount  print the size and the free space of PATH's file system instead
"""


def _storage_path_probe(
    paths: Iterable[object] | None = None, *, write: bool = False
) -> dict[str, list[object]]:
    """Sort the unusable paths by their problem; `write` also tests writing.

    Of a file the first bytes are read, of a directory one entry; of anything else only the kind is
    asked, as opening a FIFO would wait for its writer. `None` and `""` are skipped.
    """
    found: dict[str, list[object]] = {"invalid": [], "missing": [], "unreadable": []}
    if write:
        found["unwritable"] = []
    for path in paths or ():
        if path is None or path == "":
            continue
        verdict = _verdict(path, write=write)
        if verdict is not None:
            found[verdict].append(path)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (None: the process's own) and return its exit code.

    The first argument that is no option ends the options, so that a path cannot become one.

    Example:
        >>> exit_code = main(["--", "/"])
        {"invalid": [], "missing": [], "unreadable": []}
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    write = False
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        if option == "--":
            break
        # Only alone: an unset variable before a path must not make a check pass.
        if option in {"-h", "--help"} and not arguments:
            sys.stdout.write(_USAGE)
            return 0
        if option == "--mount" and arguments:
            return _print_mount(arguments[-1])
        if option != "--write":
            sys.stderr.write(f"unknown option {option}; put -- before the paths\n{_USAGE}")
            return 2
        write = True
    found = _storage_path_probe(arguments, write=write)

    import json

    from .console import write_out

    write_out(json.dumps(found) + "\n")
    return 1 if any(found.values()) else 0


def _print_mount(path: str) -> int:
    """Print the space left at a mount as JSON; the storage check runs this file by its path."""
    import json

    try:
        with os.scandir(path) as entries:
            next(entries, None)
        status = os.statvfs(path)
    except OSError as error:
        sys.stdout.write(json.dumps({"error": error.strerror or str(error)}))
        return 1
    found = {
        "blocks": status.f_blocks,
        "blocks_free": status.f_bavail,
        "block_bytes": status.f_frsize,
        "files": status.f_files,
        "files_free": status.f_favail,
    }
    sys.stdout.write(json.dumps(found))
    return 0


def _verdict(path: object, *, write: bool) -> str | None:
    if not isinstance(path, str) or not os.path.isabs(path):
        return "invalid"
    try:
        kind = os.stat(path).st_mode
        _read(path, kind)
    except OSError as error:
        return "missing" if error.errno in _MISSING else "unreadable"
    except ValueError:  # a NUL byte
        return "invalid"
    if write:
        try:
            _write(path, kind)
        except OSError:
            return "unwritable"
    return None


def _read(path: str, kind: int) -> None:
    if stat.S_ISDIR(kind):
        with os.scandir(path) as entries:
            next(entries, None)
    elif stat.S_ISREG(kind):
        # Not to wait for a writer, should a FIFO have taken the file's place.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.read(descriptor, _SAMPLE_BYTES)
        finally:
            os.close(descriptor)


def _write(path: str, kind: int) -> None:
    if stat.S_ISDIR(kind):
        target = os.path.join(path, f".nvrx-probe-{os.getpid()}-{os.urandom(8).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(target, flags, 0o600)
        try:
            os.write(descriptor, bytes(_SAMPLE_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            os.unlink(target)
    elif stat.S_ISREG(kind):
        os.close(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK))


if __name__ == "__main__":
    sys.exit(main())
