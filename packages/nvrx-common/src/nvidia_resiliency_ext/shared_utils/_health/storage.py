# SPDX-License-Identifier: Apache-2.0
"""Checks of network file systems and of storage paths, which children probe."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils.abandonable import AbandonableCall, DeadlineCaller
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError

from .check import Check, Finding, PeriodicCheck
from .pci import read_first
from .probes import Probe, abandoned_probes

_Answers = dict[str, dict[str, Any] | str]
MOUNTINFO = "/proc/self/mountinfo"

_OCTAL = re.compile(r"\\([0-7]{3})")
_FIELDS_BEFORE = 6
_FIELDS_BEHIND = 3
_KINDS = ("lustre", "nfs", "nfs4")
_MOUNT_TIMEOUT_S = 15.0
_PATH_TIMEOUT_S = 5.0
_FILE_TIMEOUT_S = 5.0
_START_S = 5.0
_AT_ONCE = 32
_PROBE_FILE = os.path.abspath(os.path.join(__file__, "../../storage_probe.py"))
_PATH_MODULE = "nvidia_resiliency_ext.shared_utils.storage_probe"


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system; it, or its mount, may be read-only."""

    path: str
    kind: str
    source: str
    is_read_only: bool


def parse_mounts(text: str, kinds: Collection[str]) -> list[Mount]:
    """Return the mounts of these types, the last of several at one place; skip nonsense."""
    found: dict[str, Mount] = {}
    # Not `splitlines`: a path may hold the other characters that end lines of a text.
    for line in text.split("\n"):
        head, separator, tail = line.partition(" - ")
        before, behind = head.split(" "), tail.split(" ")
        if not separator or len(before) < _FIELDS_BEFORE or len(behind) < _FIELDS_BEHIND:
            continue
        path = _unescape(before[4])
        found.pop(path, None)
        if behind[0] in kinds:
            options = {*before[5].split(","), *behind[2].split(",")}
            found[path] = Mount(path, behind[0], _unescape(behind[1]), "ro" in options)
    return list(found.values())


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def parse_object(data: bytes | str) -> dict[str, Any] | None:
    """Return the JSON object in a child's output, `None` if it is something else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def evaluate_mount(
    answer: Mapping[str, Any], min_free: float = 0.0, min_free_inodes: float = 0.0
) -> str | None:
    """Return the problem of a mount from its probe's answer, if any; limits are fractions."""
    if "error" in answer:
        return f"cannot be listed: {answer['error']}"
    limits = (("blocks", min_free, "space is"), ("files", min_free_inodes, "inodes are"))
    for name, least, words in limits:
        free, whole = answer.get(f"{name}_free"), answer.get(name)
        if not (isinstance(free, int) and isinstance(whole, int) and whole > 0):
            continue
        if free / whole < least:
            return f"only {free / whole:.1%} of its {words} free"
    return None


def evaluate_paths(answer: Mapping[str, Any]) -> str | None:
    """Return the problems of paths from the answer of `storage_probe`, if any."""
    problems = [
        f"{kind}: {', '.join(map(str, answer[kind]))}"
        for kind in ("invalid", "missing", "unreadable", "unwritable")
        if answer.get(kind)
    ]
    return "; ".join(problems) or None


class _Probes:
    """Asks children about paths, many at once; one that hangs is not asked about again."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._hanging: dict[str, Probe] = {}

    def ask(self, paths: Sequence[str], each_s: float, all_s: float = math.inf) -> _Answers:
        """Return each path's JSON object, or why there is none.

        Each has `each_s` seconds from the moment at which it is asked, all together `all_s`.
        """
        answers: _Answers = {}
        deadline = time.monotonic() + all_s
        waiting = iter(paths)  # of all threads: each takes the next path when it is free

        def work() -> None:
            for path in waiting:
                answers[path] = self._ask(path, each_s, all_s, deadline)

        running = [AbandonableCall("probes", work) for _ in paths[:_AT_ONCE]]
        rounds = math.ceil(len(paths) / _AT_ONCE)
        # A child may hang while it starts, where the interpreter lies on such a path, too.
        end = time.monotonic() + min(all_s, each_s * rounds) + _START_S
        for call in running:
            if call.ended.wait(max(0.0, end - time.monotonic())):
                call.result()
        return {path: answers.get(path, "cannot be probed: no child starts") for path in paths}

    def _ask(self, path: str, each_s: float, all_s: float, deadline: float) -> dict[str, Any] | str:
        left_s = deadline - time.monotonic()
        probe = self._hanging.get(path)
        if probe is not None and not probe.has_ended():
            return f"has hung for {probe.age_s():.0f} s"
        self._hanging.pop(path, None)
        if left_s <= 0:
            return f"was not asked: {_AT_ONCE} others do not answer"
        try:
            probe = Probe.start([*self._command, path])
        except ChildStartError as error:
            return f"cannot be probed: {error}"
        output = probe.result(min(each_s, left_s))
        if output is not None:
            found = parse_object(output)
            return "the probe failed" if found is None else found
        probe.kill()
        if not probe.has_ended():
            self._hanging[path] = probe
        return f"does not answer within {min(each_s, all_s):g} s"


class DistributedStorageHealthCheck(PeriodicCheck):
    """Do Lustre and the mounted network file systems answer?

    A mount that becomes read-only after construction is unhealthy too.

    Args:
        interval: Seconds between two looks of `async_check`.
        on_failure: Awaited by `async_check` after an unhealthy look.
        kinds: Types of file systems to look at, such as `beegfs`, `gpfs`, `ceph`, `fuse.juicefs`.
        timeout_s: Time for all mounts together.
        min_free_fraction: Less free space than this part is unhealthy.
        min_free_inodes_fraction: Likewise for inodes.
        sysfs_root: Folder to take for /sys.
        mountinfo: File with the list of mounts.
    """

    name = "storage"

    def __init__(  # noqa: PLR0913 - the contract's signature, and ours behind it
        self,
        interval: float = 60,
        on_failure: Callable[[], Awaitable[object]] | None = None,
        *,
        kinds: Collection[str] = _KINDS,
        timeout_s: float = _MOUNT_TIMEOUT_S,
        min_free_fraction: float = 0.0,
        min_free_inodes_fraction: float = 0.0,
        sysfs_root: str | os.PathLike[str] = "/sys",
        mountinfo: str | os.PathLike[str] = MOUNTINFO,
    ) -> None:
        super().__init__(interval, on_failure)
        self.component = "network file systems"
        self._kinds = frozenset(kinds)
        self._timeout_s = timeout_s
        self._limits = (min_free_fraction, min_free_inodes_fraction)
        self._lustre = f"{os.fspath(sysfs_root).rstrip('/')}/fs/lustre/health_check"
        self._mountinfo = os.fspath(mountinfo)
        self._caller = DeadlineCaller()
        self._probes = _Probes(sys.executable, "-I", "-S", _PROBE_FILE, "--mount", "--")
        self._writable = {mount.path for mount in self._mounts() or () if not mount.is_read_only}

    def _examine(self) -> Finding:
        problems: list[str] = []
        evidence: dict[str, Any] = {}
        state = self._lustre_state()
        if state is not None:
            evidence["lustre"] = state
            if state != "healthy":
                problems.append(f"Lustre says: {state[:200]}")
        mounts = self._mounts()
        if mounts is None:
            problems.append("the list of mounts cannot be read")
        self._look(mounts or [], problems, evidence)
        hanging = abandoned_probes()
        if hanging:
            evidence["abandoned_probes"] = hanging
        if problems:
            return Finding("unhealthy", "; ".join(problems), evidence)
        if state is None and not mounts:
            return Finding("skipped", "no network file system is mounted")
        return Finding("healthy", evidence=evidence)

    def _look(self, mounts: Sequence[Mount], problems: list[str], evidence: dict[str, Any]) -> None:
        paths = [mount.path for mount in mounts]
        answers = self._probes.ask(paths, self._timeout_s, self._timeout_s)
        for mount in mounts:
            answer = answers[mount.path]
            if isinstance(answer, str):
                problem: str | None = answer
            else:
                problem = evaluate_mount(answer, *self._limits)
                evidence[mount.path] = {"type": mount.kind, **answer}
            if problem is None and mount.is_read_only and mount.path in self._writable:
                problem = "has become read-only"
            if problem is not None:
                problems.append(f"{mount.path} ({mount.kind}): {problem}")
                evidence[mount.path] = {"type": mount.kind, "problem": problem}

    def _mounts(self) -> list[Mount] | None:
        """Return the mounts in our namespace, `None` if unreadable; it touches none of them."""
        try:
            with open(self._mountinfo, "rb") as file:
                return parse_mounts(file.read().decode("utf-8", "surrogateescape"), self._kinds)
        except OSError:
            return None

    def _lustre_state(self) -> str | None:
        try:
            state: str = self._caller.run(
                "Lustre's state", lambda: read_first(self._lustre), _FILE_TIMEOUT_S
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # or a `StuckError`, which is one
            return f"unreadable: {error}"
        return state


class StoragePathHealthCheck(Check):
    """Are these paths there and readable?

    Args:
        paths: Absolute paths of files or folders; `None` and empty ones are passed over.
        on_failure: Kept for the caller.
        timeout_s: Time for each path; many are looked at at once.
        write: Also write, flush and delete a small file in each folder.
    """

    name = "storage_path"

    def __init__(
        self,
        paths: Sequence[object] | None,
        on_failure: Callable[[], Awaitable[object]] | None = None,
        *,
        timeout_s: float = _PATH_TIMEOUT_S,
        write: bool = False,
    ) -> None:
        super().__init__(on_failure)
        self.paths = list(paths or ())
        self.component = ", ".join(str(path) for path in self.paths if path) or "no path"
        self._timeout_s = timeout_s
        options = ["--write"] if write else []
        self._probes = _Probes(sys.executable, "-m", _PATH_MODULE, *options, "--")

    def _examine(self) -> Finding:
        given = [path for path in self.paths if path is not None and path != ""]
        if not given:
            return Finding("skipped", "no path is given")
        paths = list(dict.fromkeys(path for path in given if isinstance(path, str)))
        problems = [f"invalid: {path!r}" for path in given if not isinstance(path, str)]
        for path, answer in self._probes.ask(paths, self._timeout_s).items():
            problem = answer if isinstance(answer, str) else evaluate_paths(answer)
            if problem is not None:
                problems.append(problem if path in problem else f"{path}: {problem}")
        evidence = {"paths": paths, "abandoned_probes": abandoned_probes()}
        if problems:
            return Finding("unhealthy", "; ".join(problems), evidence)
        return Finding("healthy", evidence=evidence)
