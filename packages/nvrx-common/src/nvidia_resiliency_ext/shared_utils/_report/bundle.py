# SPDX-License-Identifier: Apache-2.0
"""Makes the archive for a bug report: what goes in, how it is packed, the command."""

from __future__ import annotations

import io
import os
import platform
import socket
import sys
import tarfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence

from nvidia_resiliency_ext.shared_utils.console import plain, write_err, write_out
from nvidia_resiliency_ext.shared_utils.os_utils import open_regular_file
from nvidia_resiliency_ext.shared_utils.redaction import REDACTED, is_secret_name, redact

_LONGEST_NAME = 80
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
_MIB = 1024 * 1024
_DEFAULT_MIB = 32
_WRONG_INPUT = 2


class Bundle:
    """Collects at most `max_bytes` of text without its secrets for an archive below `top`."""

    def __init__(self, top: str, max_bytes: int) -> None:
        self._top = _safe_part(top)
        self._left_bytes = max_bytes
        self._entries: dict[str, bytes] = {}
        self._notes: list[str] = []
        self._secrets = 0
        self._files = 0

    def add(self, name: str, text: str) -> None:
        """Take a text, or note that there is no space for it."""
        kept, count = redact(text)
        data = kept.encode("utf-8", "backslashreplace")
        if len(data) > self._left_bytes:
            self._notes.append(f"{name}: left out: the bundle has reached its size")
            return
        self._left_bytes -= len(data)
        self._secrets += count
        path = "/".join(_safe_part(part) for part in name.split("/") if part not in {"", "."})
        number = 1
        unique = path
        while unique in self._entries:
            number += 1
            unique = f"{path}-{number}"
        self._entries[unique] = data

    def add_machine(self, environ: Mapping[str, str]) -> None:
        """Add versions, the self-check, and the variables that concern the job."""
        from nvidia_resiliency_ext.shared_utils.doctor import findings

        lines = [f"{each.level:<8} {each.topic}: {each.text}" for each in findings()]
        lines += ["", f"python {sys.version}", platform.platform(), f"cpus {os.cpu_count()}"]
        self.add("machine.txt", "\n".join(lines) + "\n")
        variables = []
        for name in sorted(environ):
            if name.startswith(_PREFIXES) or name in _NAMES:
                is_secret = is_secret_name(name) and environ[name] != ""
                self._secrets += is_secret
                variables.append(f"{name}={REDACTED if is_secret else environ[name]}\n")
        self.add("environment.txt", "".join(variables))

    def add_path(self, path: str, label: str) -> None:
        """Add a file, or the records, configurations and logs of a directory."""
        if not os.path.isdir(path):
            self._add_file(path, f"{label}/{os.path.basename(path)}", is_asked_for=True)
            return
        for relative in self._files_below(path):
            self._add_file(os.path.join(path, relative), f"{label}/{relative}")

    def write(self, path: str) -> int:
        """Write a new archive, readable by its owner only; return its size."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            with open(descriptor, "wb") as file:
                with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
                    for name, data in {**self._entries, "README.txt": self._readme()}.items():
                        entry = tarfile.TarInfo(f"{self._top}/{name}")
                        entry.size = len(data)
                        entry.mode = 0o600
                        entry.mtime = int(time.time())
                        tar.addfile(entry, io.BytesIO(data))
                file.flush()
                return os.fstat(file.fileno()).st_size
        except BaseException:
            os.unlink(path)
            raise

    def _readme(self) -> bytes:
        lines = [
            "What this is: records, logs' ends and settings of a job, for a bug report.",
            f"Taken out: {self._secrets} values that looked like secrets ({REDACTED}).",
            "Not taken out: names of hosts, users, files and jobs, and what logs say.",
            "Please look through it before you send it to anybody.",
            "",
            *self._notes,
        ]
        text = "\n".join(lines).rstrip()[:_CONFIG_BYTES] + "\n"
        return text.encode("utf-8", "backslashreplace")

    def _files_below(self, root: str) -> list[str]:
        """Return the names worth a look, records first; links are not followed."""
        found: list[str] = []
        seen = 0
        for folder, folders, names in os.walk(root):
            inside = os.path.relpath(folder, root)
            folders[:] = sorted(folders) if inside.count(os.sep) < _DEEPEST else []
            wanted = filter(_is_wanted, names)
            found += [os.path.normpath(os.path.join(inside, each)) for each in wanted]
            seen += len(names)
            if seen > _MOST_SEEN:
                self._notes.append(f"{root}: more than {_MOST_SEEN} files: not all were looked at")
                break
        return sorted(found, key=lambda name: (not _is_record(name), name))

    def _add_file(self, path: str, name: str, *, is_asked_for: bool = False) -> None:
        if self._files >= _MOST_FILES and not is_asked_for:
            self._notes.append(f"{name}: left out: there are {_MOST_FILES} files already")
            return
        self._files += 1
        limit = _CONFIG_BYTES if path.endswith(_CONFIG_ENDS) else _LOG_END_BYTES
        try:
            text = _text_of(path, _EVENTS_BYTES if _is_record(path) else limit)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._notes.append(f"{name}: left out: {reason}")
        else:
            self.add(name, text)


def _safe_part(part: str) -> str:
    """Return a part of a path that means the same everywhere: no separators, not hidden, short."""
    kept = "".join(
        char if char.isascii() and (char.isalnum() or char in "._-=@") else "_" for char in part
    )
    return kept.lstrip(".-")[-_LONGEST_NAME:] or "_"


def _is_wanted(name: str) -> bool:
    return name.endswith((*_CONFIG_ENDS, *_LOG_ENDS)) or name.startswith(_LOG_NAMES)


def _is_record(path: str) -> bool:
    return os.path.basename(path).startswith(("events-", "failures"))


def _text_of(path: str, limit: int) -> str:
    """Return a file's text; of a long one its first line and its end."""
    with open_regular_file(path, follows_symlink=False) as file:
        size = os.fstat(file.fileno()).st_size
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


def main(argv: Sequence[str], report_texts: Callable[[Sequence[str]], Mapping[str, str]]) -> int:
    """Make the archive of the arguments after `bundle`; return 0, or 2 where it cannot be made."""
    options = _parse(argv)
    paths = options.paths or [path for path in (os.environ.get("NVRX_EVENT_DIR"),) if path]
    for path in (*paths, *options.config):
        if not os.path.exists(path):
            return _complain(f"{path}: there is no such file or directory")
    host = socket.gethostname()
    top = f"nvrx-bundle-{host}-{time.strftime('%Y%m%dT%H%M%S')}"
    target = options.output or f"{top}.tar.gz"
    bundle = Bundle(top, max(1, options.max_size) * _MIB)
    bundle.add_machine(os.environ)
    for name, text in report_texts(paths).items():
        bundle.add(name, text)
    for path in options.config:
        bundle.add_path(path, "config")
    for number, path in enumerate(paths):
        bundle.add_path(path, f"files-{number}")
    try:
        size = bundle.write(target)
    except OSError as error:
        return _complain(f"{target}: {error.strerror}")
    write_out(
        f"{target}: {size / _MIB:.1f} MiB. Secrets that were recognised are taken out; please look"
        " through it before you send it to anybody.\n"
    )
    return 0


def _parse(argv: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="nvrx-report bundle",
        description="Put what a bug report needs into one archive: the event files, the"
        " report, versions, the self-check, settings and the ends of logs, without secrets.",
    )
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="directory of records and logs (as --log-dir), or a file; default NVRX_EVENT_DIR",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the archive; must not exist yet")
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="a file of settings; repeat"
    )
    parser.add_argument(
        "--max-size",
        type=int,
        default=_DEFAULT_MIB,
        metavar="MIB",
        help=f"how much text to take at most; default {_DEFAULT_MIB}",
    )
    return parser.parse_args(argv)


def _complain(message: str) -> int:
    write_err(f"nvrx-report bundle: {plain(message)}\n")
    return _WRONG_INPUT
