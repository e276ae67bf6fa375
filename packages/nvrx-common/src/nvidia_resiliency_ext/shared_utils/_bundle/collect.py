# SPDX-License-Identifier: Apache-2.0
"""Owns what goes into a bundle: which files, how much of each, what is said about the machine.

Every text is redacted on its way. What is left out is listed, with the reason.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
from typing import TYPE_CHECKING

from .names import is_secret_name
from .redact import REDACTED, redact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .archive import Archive

__all__ = ["Collector"]

_LOG_END_BYTES = 256 * 1024
_EVENTS_BYTES = 8 * 1024 * 1024
_CONFIG_BYTES = 256 * 1024
_MOST_FILES = 500
_MOST_SEEN = 20_000
_DEEPEST = 6
_CONFIG_ENDS = (".yaml", ".yml", ".toml", ".ini", ".cfg", ".json")
_LOG_ENDS = (".log", ".txt", ".out", ".err", ".jsonl", ".stacks")
_LOG_NAMES = ("rank_", "stdout", "stderr", "slurm-", "events-", "failures")
_PREFIXES = (
    "NVRX_", "FT_", "FAULT_TOL", "TORCH", "PET_", "NCCL_", "GLOO_", "CUDA_", "SLURM_", "MASTER_",
    "OMP_", "PYTHON", "UCX_", "LD_", "PBS_", "KUBERNETES_",
)  # fmt: skip
_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TMPDIR", "LANG", "TZ"}
)


class Collector:
    """Fills an archive.

    Args:
        archive: Takes the texts.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._notes: list[str] = []
        self._secrets = 0
        self._files = 0

    def add(self, name: str, text: str) -> None:
        """Add a text without its secrets."""
        kept, count = redact(text)
        if self._archive.add(name, kept):
            self._secrets += count
        else:
            self._notes.append(f"{name}: left out: the bundle has reached its size")

    def add_machine(self, environ: Mapping[str, str]) -> None:
        """Add versions, the self-check, and the variables that concern the job."""
        from nvidia_resiliency_ext.shared_utils.doctor import findings

        lines = [f"{each.level:<8} {each.topic}: {each.text}" for each in findings()]
        lines += ["", f"python {sys.version}", platform.platform(), f"cpus {os.cpu_count()}"]
        self.add("machine.txt", "\n".join(lines) + "\n")
        self.add("environment.txt", "".join(self._variables(environ)))

    def add_path(self, path: str, label: str) -> None:
        """Add a file, or what a directory has of records, configurations and logs."""
        if not os.path.isdir(path):
            self._add_file(path, f"{label}/{os.path.basename(path)}", is_asked_for=True)
            return
        for relative in self._files_below(path):
            self._add_file(os.path.join(path, relative), f"{label}/{relative}")

    def finish(self) -> None:
        """Add the page that says what is here and what is not."""
        lines = [
            "What this is: records, logs' ends and settings of a job, for a bug report.",
            f"Taken out: {self._secrets} values that looked like secrets ({REDACTED}).",
            "Not taken out: names of hosts, users, files and jobs, and what logs say.",
            "Please look through it before you send it to anybody.",
            "",
            *self._notes,
        ]
        self._archive.left_bytes += _CONFIG_BYTES
        self._archive.add("README.txt", "\n".join(lines).rstrip()[:_CONFIG_BYTES] + "\n")

    def _variables(self, environ: Mapping[str, str]) -> Iterator[str]:
        for name in sorted(environ):
            if not name.startswith(_PREFIXES) and name not in _NAMES:
                continue
            value = environ[name]
            if is_secret_name(name) and value:
                self._secrets += 1
                value = REDACTED
            yield f"{name}={value}\n"

    def _files_below(self, root: str) -> Iterator[str]:
        """Yield the names worth a look, records first; links are not followed."""
        found: list[str] = []
        seen = 0
        for folder, folders, names in os.walk(root):
            depth = os.path.relpath(folder, root).count(os.sep)
            folders[:] = sorted(folders) if depth < _DEEPEST else []
            for name in sorted(names):
                seen += 1
                if _is_wanted(name):
                    found.append(os.path.relpath(os.path.join(folder, name), root))
            if seen > _MOST_SEEN:
                self._notes.append(f"{root}: more than {_MOST_SEEN} files: not all were looked at")
                break
        yield from sorted(found, key=lambda name: (not _is_record(name), name))

    def _add_file(self, path: str, name: str, *, is_asked_for: bool = False) -> None:
        if self._files >= _MOST_FILES and not is_asked_for:
            self._notes.append(f"{name}: left out: there are {_MOST_FILES} files already")
            return
        self._files += 1
        try:
            text = _text_of(path, _limit_of(path))
        except OSError as error:
            self._notes.append(f"{name}: left out: {error.strerror}")
            return
        except ValueError as error:
            self._notes.append(f"{name}: left out: {error}")
            return
        self.add(name, text)


def _is_wanted(name: str) -> bool:
    return name.endswith((*_CONFIG_ENDS, *_LOG_ENDS)) or name.startswith(_LOG_NAMES)


def _is_record(path: str) -> bool:
    name = os.path.basename(path)
    return name.startswith(("events-", "failures"))


def _limit_of(path: str) -> int:
    if _is_record(path):
        return _EVENTS_BYTES
    return _CONFIG_BYTES if path.endswith(_CONFIG_ENDS) else _LOG_END_BYTES


def _text_of(path: str, limit: int) -> str:
    """Return a file's text; of a long one its first line and its end.

    Raises:
        OSError: It cannot be read or is no regular file.
        ValueError: It is no text.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        data = file.readline(limit) if size > limit else b""
        if size > limit:
            file.seek(size - limit)
            left_out = size - limit - len(data)
            # A cut line could begin in the middle of a secret whose name is gone.
            file.readline(limit)
            data = data.rstrip(b"\n") + f"\n... {max(0, left_out)} bytes ...\n".encode()
        data += file.read(limit)
    if b"\0" in data:
        raise ValueError("not a text")
    return data.decode("utf-8", "replace")
