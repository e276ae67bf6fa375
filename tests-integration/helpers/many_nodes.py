# SPDX-License-Identifier: Apache-2.0
"""One job on several hosts: a launcher on each, what its ranks record, and that nothing is left.

The hosts are those of `hosts.py`. The ranks are `counting_rank.py` (no torch) or `ddp_rank.py`;
what they write to the shared folder tells a test how far the job is, and afterwards whether two
groups of ranks were ever at work at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fault_jobs import DEADLINE_S, GONE_WITHIN_S, LAUNCHER, MARK, command_of, wait_until
from results import no_second_try

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hosts import Host, HostProcess, Network

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
COUNTING_RANK = PROGRAMS / "counting_rank.py"
DDP_RANK = PROGRAMS / "ddp_rank.py"
RECORD = "record.jsonl"
PORT = 29400
TAIL = 4000
TCP_LISTEN = "0A"

Entry: TypeAlias = "dict[str, Any]"


@functools.cache
def _counting() -> Any:
    """Return the counting rank's module, which knows what its result must be."""
    sys.path.insert(0, str(PROGRAMS))
    try:
        return importlib.import_module("counting_rank")
    finally:
        sys.path.remove(str(PROGRAMS))


def counted(steps: int) -> str:
    """Return the result of counting ranks after some steps."""
    return str(_counting().state_after(steps))


# --- what the record says ------------------------------------------------------------------------


def read_record(folder: Path, clock_offsets: Mapping[str, float] | None = None) -> list[Entry]:
    """Return the ranks' record; times are brought to one clock by the hosts' offsets."""
    path = folder / RECORD
    entries = []
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            entry = json.loads(line)
            entry["t"] -= (clock_offsets or {}).get(entry["host"], 0.0)
            entries.append(entry)
    return entries


def overlaps(entries: Iterable[Entry]) -> list[str]:
    """Return where two groups of ranks were at work at once: one line for each case.

    A group is a cycle of an attempt. It is at work from its first step or write to its last. Two
    processes of one group with the same rank are a case as well, and so are ranks that met others
    of another group.
    """
    found = []
    first: dict[tuple[int, int], Entry] = {}
    last: dict[tuple[int, int], Entry] = {}
    who: dict[tuple[int, int, int], list[tuple[str, int]]] = {}
    for entry in sorted(entries, key=lambda entry: float(entry["t"])):
        group = (entry["attempt"], entry["cycle"])
        process = (entry["host"], entry["pid"])
        same_rank = who.setdefault((*group, entry["rank"]), [])
        if process not in same_rank:
            if same_rank:
                found.append(f"{entry} has the rank of {same_rank}")
            same_rank.append(process)
        if entry["what"] == "foreign_rank":
            found.append(f"met a foreign rank: {entry}")
        if entry["what"] in ("step", "save", "saved"):
            first.setdefault(group, entry)
            last[group] = entry
    groups = sorted(first)
    for earlier, later in itertools.pairwise(groups):
        if last[earlier]["t"] >= first[later]["t"]:
            found.append(f"{last[earlier]} is after {first[later]}")
    return found


# --- the job -------------------------------------------------------------------------------------


class NodesJob:
    """A job whose launchers run on hosts; the folder is what the hosts share."""

    def __init__(self, network: Network, folder: Path, *, launcher: str = LAUNCHER) -> None:
        """Prepare a job; start nothing.

        Args:
            network: The hosts, up.
            folder: An empty folder that all hosts see (see `Network(keep=...)`).
            launcher: The module that is run on each host; `torch.distributed.run` also works.
        """
        self.network = network
        self.folder = folder
        self.launcher = launcher
        self.id = uuid.uuid4().hex
        self.shared = folder / "shared"
        self.events_folder = folder / "events"
        for path in (self.shared, self.events_folder):
            path.mkdir(parents=True)
        self.launchers: dict[str, HostProcess] = {}
        self._accepted: set[str] = set()
        self.others: list[HostProcess] = []

    # --- start ---------------------------------------------------------------------------------

    def environment(self, changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Return the environment of a program on a host: little of ours, with the mark."""
        kept = ("PATH", "HOME", "LANG", "USER", "LD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {
            MARK: self.id,
            "NVRX_EVENT_DIR": str(self.events_folder),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name, value in (changes or {}).items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        return environment

    def command(  # noqa: PLR0913 - named, and each of them a fact of its own
        self,
        *arguments: str,
        nnodes: str | int = "",
        nproc: int | str = 1,
        max_restarts: int = 3,
        endpoint: str = "",
        rendezvous: Sequence[str] | None = None,
        flags: Sequence[str] = (),
        program: Path = COUNTING_RANK,
    ) -> list[str]:
        """Return a launcher's command line; programs get the shared folder and the arguments.

        The rendezvous is at the first host unless an endpoint is given, or by the flags of
        `rendezvous`.
        """
        if rendezvous is None:
            rendezvous = [
                *("--rdzv-backend", "c10d", "--rdzv-id", self.id),
                *("--rdzv-endpoint", endpoint or f"{self.network[0].name}:{PORT}"),
            ]
        return [
            *(sys.executable, "-m", self.launcher),
            *("--nnodes", str(nnodes or len(self.network)), "--nproc-per-node", str(nproc)),
            *("--max-restarts", str(max_restarts), *rendezvous),
            *(*flags, str(program), str(self.shared), *arguments),
        ]

    def start(
        self,
        *arguments: str,
        hosts: Sequence[Host] | None = None,
        environment: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
        **more: Any,
    ) -> NodesJob:
        """Start a launcher on each of the hosts, all by default; the rest is for `command`.

        May be called again for hosts that come late or with other flags; a host's earlier launcher
        must have ended.
        """
        command = [*prefix, *self.command(*arguments, **more)]
        for host in self.network if hosts is None else hosts:
            known = self.launchers.get(host.name)
            assert known is None or known.poll() is not None, f"{host} has a launcher"
            self.launchers[host.name] = host.start(
                command,
                env=self.environment(environment),
                cwd=self.folder,
                stdout=self.log_path(host),
                stderr=subprocess.STDOUT,
            )
        return self

    def start_other(self, host: Host, argv: Sequence[str], name: str) -> HostProcess:
        """Start another program of the job on a host, such as its control plane."""
        process = host.start(
            argv,
            env=self.environment(),
            cwd=self.folder,
            stdout=self.folder / f"log-{name}",
            stderr=subprocess.STDOUT,
        )
        self.others.append(process)
        return process

    # --- what is seen --------------------------------------------------------------------------

    def log_path(self, host: Host) -> Path:
        """Return where launcher and ranks of a host print to."""
        return self.folder / f"log-{host.name}"

    def log(self, host: Host) -> str:
        """Return what launcher and ranks of a host have printed so far."""
        path = self.log_path(host)
        return path.read_text(errors="replace") if path.exists() else ""

    def tails(self) -> str:
        """Return the end of every log, for messages."""
        paths = sorted(self.folder.glob("log-*"))
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-TAIL:]}" for p in paths)

    def record(self) -> list[Entry]:
        """Return what the ranks have recorded so far, times by this process's clock."""
        offsets = {host.name: float(host.clock_offset_s) for host in self.network}
        return read_record(self.shared, offsets)

    def entries(self, what: str, cycle: int | None = None) -> list[Entry]:
        """Return the entries of a kind, of one cycle or all."""
        return [e for e in self.record() if e["what"] == what and cycle in (None, e["cycle"])]

    def cycles(self) -> list[int]:
        """Return the cycles in which some rank has started."""
        return sorted({entry["cycle"] for entry in self.entries("start")})

    def events(self, kind: str | None = None) -> list[Entry]:
        """Return the recorded events of all nodes, or those of a kind."""
        found = []
        for path in sorted(self.events_folder.glob("events-*.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return [event for event in found if kind in (None, event.get("kind"))]

    def rank(self, cycle: int, rank: int) -> tuple[Host, int]:
        """Return where a rank of a cycle runs, and its pid there."""
        entry = next(e for e in self.entries("start", cycle) if e["rank"] == rank)
        host = next(host for host in self.network if host.name == entry["host"])
        return host, entry["pid"]

    def result(self) -> Entry:
        """Return the job's result."""
        result: Entry = json.loads((self.shared / "result.json").read_text())
        return result

    # --- faults and waiting --------------------------------------------------------------------

    def signal_rank(self, cycle: int, rank: int, number: int = signal.SIGKILL) -> Host:
        """Send a signal to a rank and return its host."""
        host, pid = self.rank(cycle, rank)
        assert host.signal(pid, number), f"rank {rank} of cycle {cycle} is gone"
        return host

    def wait_for(self, condition: Callable[[], Any], what: str, limit_s: float = DEADLINE_S) -> Any:
        """Wait until a condition holds and return its value; fail early when all have left."""

        def checked() -> Any:
            left = all(process.poll() is not None for process in self.launchers.values())
            if (value := condition()) or not left:
                return value
            raise AssertionError(f"the launchers have left: {what}\n{self.tails()}")

        return wait_until(checked, lambda: f"{what}\n{self.tails()}", limit_s)

    def wait_for_step(
        self, cycle: int, step: int = 1, *, ranks: int = 1, limit_s: float = DEADLINE_S
    ) -> None:
        """Wait until so many ranks of a cycle have done a step or a later one."""

        def done() -> bool:
            entries = self.entries("step", cycle)
            return len({e["rank"] for e in entries if e["step"] >= step}) >= ranks

        self.wait_for(done, f"step {step} of {ranks} ranks in cycle {cycle}", limit_s)

    def first_step(self, cycle: int) -> float:
        """Return when the last rank of a cycle had done its first step, by this process's clock."""
        first: dict[int, float] = {}
        for entry in self.entries("step", cycle):
            first.setdefault(entry["rank"], entry["t"])
        return max(first.values())

    def workers_started(self, cycle: int) -> float:
        """Return when the first worker of a cycle was started, by the wall clock.

        What follows, the start of a Python, takes a busy machine many seconds.
        """
        return float(min(e["t"] for e in self.events("worker_start") if e["cycle"] == cycle))

    def let_end(self) -> None:
        """Tell counting ranks to end some steps from now, or as soon as they hear of it."""
        steps = max((int(entry["step"]) for entry in self.entries("step")), default=0) + 20
        told = self.shared / "steps"
        told.with_suffix(".new").write_text(str(steps))
        told.with_suffix(".new").replace(told)

    def wait(self, limit_s: float = DEADLINE_S) -> dict[str, int]:
        """Wait until all launchers have left and return their exit codes by host."""

        def ended() -> bool:
            return all(process.poll() is not None for process in self.launchers.values())

        wait_until(ended, lambda: f"launchers ended\n{self.tails()}", limit_s)
        return {name: process.wait(0) for name, process in self.launchers.items()}

    # --- what must hold in the end -------------------------------------------------------------

    @no_second_try()
    def assert_counted(self, steps: int | None = None) -> None:
        """Check that counting ranks have the result of an undisturbed run.

        Without a number it is of as many steps as they were let do.
        """
        steps = self.result()["step"] if steps is None else steps
        assert self.result()["step"] == steps, self.tails()
        assert self.result()["weights_sha256"] == counted(steps), self.tails()

    @no_second_try()
    def assert_fenced(self) -> None:
        """Check that never two groups of ranks were at work at once."""
        found = overlaps(self.record())
        assert not found, "\n".join([*found, self.tails()])

    def leftovers(self) -> list[str]:
        """Return what is left of the job on the hosts that are up, one line each."""
        left = []
        for host in self.network:
            if host.is_up:
                left += [f"{host.name}: {line}" for line in _left_on(host, self.network.kept)]
        return [line for line in left if line not in self._accepted]

    def accept_present(self, host: Host | None = None) -> None:
        """Take what is on the hosts now, such as Slurm's daemons, for theirs and not the job's."""
        prefix = "" if host is None else f"{host.name}: "
        self._accepted |= {line for line in self.leftovers() if line.startswith(prefix)}

    def assert_nothing_left(self, limit_s: float = GONE_WITHIN_S) -> None:
        """Check that nothing of the job is left on any host, within a time."""

        def listed() -> str:
            return "\n".join(["nothing left", *self.leftovers(), self.tails()])

        wait_until(lambda: not self.leftovers(), listed, limit_s)


def _left_on(host: Host, kept: Iterable[str]) -> list[str]:
    """Return processes, files and sockets that are on a host and were not when it booted."""
    left = [f"process {pid}: {command_of(pid)}" for pid in host.processes()]
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run"):
        for name in os.listdir(host.has(folder)):
            path = f"{folder}/{name}"
            # torch keeps a cache; /run/host is the host's own.
            if path not in kept and path != "/run/host" and not name.startswith("torchinductor_"):
                left.append(f"file {path}")
    network = Path(f"/proc/{host.agent_pid}/net")
    for family in ("tcp", "tcp6"):
        for line in (network / family).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == TCP_LISTEN:
                left.append(f"{family} listener {words[1]}")
    unix = (network / "unix").read_text().splitlines()[1:]
    left += [f"socket {line.split()[7]}" for line in unix if len(line.split()) > 7]
    return left
