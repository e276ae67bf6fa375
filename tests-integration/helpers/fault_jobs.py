# SPDX-License-Identifier: Apache-2.0
"""One real ft_launcher under test: start it, wait for what its ranks write, see that it is gone.

The ranks are `programs/scripted_rank.py` unless a test says otherwise. Everything that belongs to
a job carries a mark in its environment, by which leftovers are found.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HERE = Path(__file__).resolve().parent
SCRIPTED_RANK = HERE.parent / "programs" / "scripted_rank.py"
LAUNCHER = "nvidia_resiliency_ext.fault_tolerance.launcher"
MARK = "NVRX_INTEGRATION_TEST_JOB"
DEADLINE_S = 120.0
GONE_WITHIN_S = 50.0
# Ranks that hang do so in a section of their own: the steps of the others may take their time.
WATCHED_SECTIONS = ("--ft-rank-section-timeouts", "step:30,stuck:1,outer:1.5")


def wait_until(
    condition: Callable[[], Any], what: str | Callable[[], str], limit_s: float = DEADLINE_S
) -> Any:
    """Wait until a condition holds and return its value; fail after the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        if began > deadline:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {limit_s} s: {said}")
        # Looks that read all events of a job take a fifth of a core at most.
        time.sleep(max(0.01, 4 * (time.monotonic() - began)))


def is_running(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def state_of(pid: int) -> str:
    """Return the state letter of a process, or nothing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def command_of(pid: int) -> str:
    """Return a process's command line, or nothing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def marked(name: str, value: str) -> set[int]:
    """Return the running processes that have a variable in their environment."""
    needle = f"{name}={value}".encode()
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            if needle in environ and is_running(int(entry)):
                found.add(int(entry))
    return found


def _has_living_owner(run_directory: Path) -> bool:
    """Say whether a run directory belongs to a process that runs, such as another test's."""
    try:
        return is_running(json.loads((run_directory / "owner.json").read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return False


class Job:
    """A launcher, its ranks, and the folder that they write to."""

    def __init__(self, folder: Path) -> None:
        """Prepare a job in an empty folder; start nothing."""
        self.id = uuid.uuid4().hex
        self.folder = folder
        self.out = folder / "out"
        self.record = folder / "record"
        self.temporary = folder / "tmp"
        for path in (self.out, self.record, self.temporary):
            path.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None
        self._shm_before = set(os.listdir("/dev/shm"))

    # --- start ---------------------------------------------------------------------------------

    def environment(self, changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Return the launcher's environment: little of ours, with the mark."""
        kept = ("PATH", "HOME", "LANG", "USER", "LD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {
            MARK: self.id,
            "TMPDIR": str(self.temporary),
            "NVRX_EVENT_DIR": str(self.record),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name, value in (changes or {}).items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        return environment

    def start(  # noqa: PLR0913 - all of them have defaults
        self,
        *arguments: str,
        nproc: int | str = 2,
        max_restarts: int = 3,
        flags: Sequence[str] = (),
        prewarm: str = "off",
        program: Path = SCRIPTED_RANK,
        environment: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
    ) -> Job:
        """Start the launcher. Scripted ranks get the output folder and the arguments."""
        if program == SCRIPTED_RANK:
            arguments = (str(self.out), *arguments)
        command = [
            *(*prefix, sys.executable, "-m", LAUNCHER),
            *("--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)),
            *("--ft-prewarm", prewarm, *flags, str(program), *arguments),
        ]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=self.environment(environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    # --- what is seen --------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The launcher's pid."""
        assert self.process is not None
        return self.process.pid

    def log(self) -> str:
        """Return what launcher and ranks have printed so far."""
        return (self.folder / "log").read_text(errors="replace")

    def lines(self, cycle: int, rank: int) -> list[list[str]]:
        """Return what a rank has written so far, as words."""
        path = self.out / f"progress_{cycle}_{rank}"
        if not path.exists():
            return []
        return [line.split() for line in path.read_text().splitlines()]

    def has(self, cycle: int, rank: int, word: str) -> bool:
        """Say whether a rank has written a line that begins with a word."""
        return any(line[:1] == [word] for line in self.lines(cycle, rank))

    def wait_for(self, cycle: int, ranks: Sequence[int], word: str, limit_s: float = 30.0) -> None:
        """Wait until all the ranks have written a line that begins with a word."""

        def missing() -> str:
            lacking = [rank for rank in ranks if not self.has(cycle, rank, word)]
            return f"{word!r} of ranks {lacking} in cycle {cycle}\n{self.log()[-6000:]}"

        def done() -> bool:
            if all(self.has(cycle, rank, word) for rank in ranks):
                return True
            assert self.process is not None
            if self.process.poll() is None or all(self.has(cycle, r, word) for r in ranks):
                return False
            raise AssertionError(f"the launcher left ({self.process.poll()}): {missing()}")

        wait_until(done, missing, limit_s)

    def value(self, cycle: int, rank: int, word: str) -> str:
        """Return what stands behind the first such word of a rank."""
        return next(line[1] for line in self.lines(cycle, rank) if line[0] == word)

    def rank_pid(self, cycle: int, rank: int) -> int:
        """Return a rank's pid."""
        return int(self.value(cycle, rank, "started"))

    def cycles(self) -> list[int]:
        """Return the cycles in which some rank has started."""
        return sorted({int(path.name.split("_")[1]) for path in self.out.glob("progress_*")})

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the recorded events, or those of a kind."""
        found = []
        for path in sorted(self.record.glob("events-*.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return [event for event in found if kind in (None, event.get("kind"))]

    def standby_states(self) -> dict[int, str]:
        """Return the last recorded state of each standby."""
        return {event["slot"]: event["state"] for event in self.events("standby")}

    def wait_for_standbys(self, count: int) -> None:
        """Wait until so many standbys are ready; one that became a rank counts no more."""
        wait_until(
            lambda: list(self.standby_states().values()).count("ready") == count,
            lambda: f"{count} ready standbys: {self.standby_states()}\n{self.log()}",
        )

    def failures(self) -> list[dict[str, Any]]:
        """Return the failure record."""
        path = self.record / "failures.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def processes(self) -> set[int]:
        """Return everything alive that belongs to the job, the launcher too."""
        return marked(MARK, self.id)

    def monitor_pid(self) -> int:
        """Return the monitor's pid, when it runs."""
        found = [
            pid for pid in self.processes() if pid != self.pid and "_monitor" in command_of(pid)
        ]
        assert len(found) == 1, [command_of(pid) for pid in self.processes()]
        return found[0]

    # --- end -----------------------------------------------------------------------------------

    def wait(self, limit_s: float = DEADLINE_S) -> int:
        """Wait until the launcher has left and return its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            alive = {pid: (state_of(pid), command_of(pid)) for pid in self.processes()}
            raise AssertionError(
                f"still there after {limit_s} s: {alive}\n{self.log()[-6000:]}"
            ) from None

    def leftovers(self) -> list[str]:
        """Return what is left of the job outside its folders, one line each."""
        left = [f"process {pid}: {command_of(pid)}" for pid in self.processes()]
        left += [
            f"temporary: {os.path.join(folder, name)}"
            # Unlike rglob, it takes no offence at folders that are being removed.
            for folder, folders, files in os.walk(self.temporary)
            for name in (*folders, *files)
            if not name.startswith("torchinductor_")  # a cache that torch keeps
        ]
        left += [
            f"shared memory: {name}"
            for name in set(os.listdir("/dev/shm")) - self._shm_before
            if name.startswith("nvrx") and not _has_living_owner(Path("/dev/shm", name))
        ]
        sockets = Path("/proc/net/unix").read_text()
        left += [line for line in sockets.splitlines() if str(self.temporary) in line]
        return left

    def assert_nothing_left(self, limit_s: float = GONE_WITHIN_S) -> None:
        """Check that nothing of the job is left, within a time."""
        deadline = time.monotonic() + limit_s
        while left := self.leftovers():
            assert time.monotonic() < deadline, "\n".join([*left, self.log()[-3000:]])
            time.sleep(0.02)

    def close(self) -> None:
        """Kill whatever a failed test has left and remove the folders."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)
