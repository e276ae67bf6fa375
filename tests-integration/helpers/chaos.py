# SPDX-License-Identifier: Apache-2.0
"""A campaign of random faults against one job on four hosts: three work, one is a spare.

A host whose launcher is lost gets another one, as a scheduler would give it. After each fault the
job must train again with all its ranks, for no more restarts than the fault is worth; in the end
it must have the result of an undisturbed run, never two groups at work, and nothing left.

Two layouts: the store in the launcher of the first host, whose launcher is then spared (with it
the job ends, by design); or on a fifth host under `nvrx-control`, which may be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaos_plan import (
    DEADLINE_S,
    DECIDED_S,
    LAUNCHER_KINDS,
    LEASE_S,
    SURELY_LOST_S,
    Fault,
    restarts_allowed,
)
from fault_jobs import GONE_WITHIN_S, command_of, wait_until
from many_nodes import PORT, RECORD, NodesJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hosts import Host, HostProcess, Network

WORKING, SPARES, NPROC = 3, 1, 2
WORLD = WORKING * NPROC
NNODES = f"{WORKING}:{WORKING + SPARES}"
STEP_MS = 80
NEVER = 10**9
CONTROL = "nvidia_resiliency_ext.fault_tolerance.control_plane"
WAITS = ("it is a spare", "goes on without this node")
LEAVES = ("this node leaves the job", "job ended with exit code")
LEAVES_WITH = (1, -signal.SIGKILL)
FLAGS = (
    *("--ft-prewarm", "off", "--ft-lease", f"{LEASE_S:g}"),
    # Longer than it takes to find a lost host, so that the lease finds it and not the heartbeat.
    *("--ft-rank-heartbeat-timeout", "5", "--ft-initial-rank-heartbeat-timeout", "60"),
)
SPARE_SHARE = 0.2
CUT_FLAP_S = 0.3
BAD_LINK = (20.0, 0.02)
BAD_LINK_S = 2.0


def hosts_needed(*, control: bool) -> int:
    """Return on how many hosts a campaign runs."""
    return WORKING + SPARES + control


@dataclass(frozen=True)
class Outcome:
    """What a fault cost: restarts, and the seconds until all ranks trained again.

    Of a new control plane: until all launchers had found it. None where nothing stood still.
    """

    fault: Fault
    victim: str
    recovery_s: float | None
    restarts: int
    left_with: dict[str, int]


class Watch:
    """What the ranks have recorded, read as it grows."""

    def __init__(self, job: NodesJob, world: int = WORLD) -> None:
        """Watch a job of so many ranks."""
        self._world = world
        self._path = job.shared / RECORD
        self._offsets = {host.name: float(host.clock_offset_s) for host in job.network}
        self._read_to = 0
        self.starts: dict[int, dict[int, tuple[str, int]]] = {}
        self.steps: dict[int, dict[int, list[tuple[float, int]]]] = {}

    def update(self) -> None:
        """Read what is new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_to)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read_to += len(data)
        for line in data.splitlines():
            entry = json.loads(line)
            cycle, rank = entry["cycle"], entry["rank"]
            if entry["what"] == "start":
                self.starts.setdefault(cycle, {})[rank] = (entry["host"], entry["pid"])
            elif entry["what"] == "step":
                at = entry["t"] - self._offsets[entry["host"]]
                steps = self.steps.setdefault(cycle, {}).setdefault(rank, [])
                steps.append((at, entry["step"]))

    @property
    def cycle(self) -> int:
        """The newest cycle in which a rank has started; -1 before the first."""
        return max(self.starts, default=-1)

    def trains_since(self, moment: float, cycle: int) -> float | None:
        """Return when all ranks of the newest cycle had begun and done a step after a moment.

        None while they have not, or while the newest cycle is before `cycle`.
        """
        if self.cycle < cycle:
            return None
        ranks = self.steps.get(self.cycle, {})
        # The second one that ends afterwards has begun afterwards too.
        done = [[at for at, _ in steps if at > moment] for steps in ranks.values()]
        if len(done) < self._world or any(len(times) < 2 for times in done):
            return None
        return max(times[0] for times in done)

    @property
    def last_step(self) -> int:
        """The last step that any rank of any cycle has done."""
        steps = (done[-1][1] for ranks in self.steps.values() for done in ranks.values())
        return max(steps, default=0)


class Campaign:
    """Makes faults in one job and checks what follows."""

    def __init__(
        self,
        network: Network,
        job: NodesJob,
        *,
        control: bool,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.network = network
        self.job = job
        self.control_host = network[0] if control else None
        self.control: HostProcess | None = None
        self.hosts = list(network)[control:]
        self.watch = Watch(job)
        self.outcomes: list[Outcome] = []
        self._report = report
        # Hosts whose launcher may leave, and whether it must.
        self._gone: dict[Host, bool] = {}
        self._controls = 0
        self._left_with: dict[str, int] = {}
        self._log_from: dict[str, int] = {}
        self._restarts = 0

    # --- one campaign --------------------------------------------------------------------------

    def run(self, faults: Iterable[Fault]) -> list[Outcome]:
        """Make the faults one after the other, then let the job end and check its result."""
        if self.control_host is not None:
            self._start_control()
        self._start(self.hosts)
        self._wait(lambda: self.watch.trains_since(0, 0), "the job trains")
        self._wait_until_whole()
        for fault in faults:
            self.outcomes.append(self._one(fault))
        self._end()
        return self.outcomes

    def _end(self) -> None:
        self.job.let_end()
        codes = self.job.wait(DEADLINE_S)
        assert set(codes.values()) == {0}, f"{codes}\n{self.job.tails()}"
        if self.control is not None:
            assert self.control.wait(20) == 0, self.job.tails()
        self.job.assert_counted()
        self.job.assert_fenced()
        self.job.assert_nothing_left()
        self._expect_cycle(self._restarts)

    def _one(self, fault: Fault) -> Outcome:
        reached = self.watch.last_step
        self._wait(lambda: self.watch.last_step >= reached + fault.steps_before, "training")
        before = self.watch.cycle
        self._expect_cycle(self._restarts)
        victim, hits_workers = self._victim(fault)
        self._report(f"{fault} hits {victim}")
        allowed = restarts_allowed(fault, hits_workers=hits_workers)
        began = time.monotonic()
        decided = self._make(fault, victim)
        recovered = self._wait(
            lambda: self.watch.trains_since(decided, before + allowed.start),
            f"training again after {fault}",
        )
        self._wait_until_whole()
        restarts = self.watch.cycle - before
        assert restarts in allowed, (
            f"{restarts} restarts, allowed {allowed}: {fault}\n{self.job.tails()}"
        )
        self._restarts += restarts
        if restarts:
            recovered = self.watch.trains_since(began, before + restarts) or recovered
        is_told = restarts or fault.kind == "kill_control"
        recovery_s = round(recovered - began, 3) if is_told else None
        left_with, self._left_with = self._left_with, {}
        return Outcome(fault, victim.name, recovery_s, restarts, left_with)

    def _expect_cycle(self, cycle: int) -> None:
        self.watch.update()
        found = self.watch.cycle
        assert found == cycle, f"cycle {found}, not {cycle}: a restart more\n{self.job.tails()}"

    # --- whom ----------------------------------------------------------------------------------

    def _working(self) -> list[Host]:
        names = {host for host, _ in self.watch.starts[self.watch.cycle].values()}
        return [host for host in self.hosts if host.name in names]

    def _victim(self, fault: Fault) -> tuple[Host, bool]:
        """Return the host that a fault hits, and whether ranks work there."""
        working = self._working()
        hosts = working
        if fault.kind in (*LAUNCHER_KINDS, "kill_monitor", "flap_link", "bad_link"):
            # The spare now and then.
            hosts = self._may_go(working if fault.chance[1] > SPARE_SHARE else self.hosts)
        host = hosts[int(fault.chance[0] * len(hosts))]
        return host, host in working

    def _may_go(self, hosts: Iterable[Host]) -> list[Host]:
        """Return the hosts without the store."""
        return [h for h in hosts if self.control_host is not None or h is not self.hosts[0]]

    def _signal_rank(self, host: Host, number: int, chance: float) -> None:
        here = [pid for name, pid in self.watch.starts[self.watch.cycle].values()
                if name == host.name]  # fmt: skip
        host.signal(here[int(chance * len(here))], number)

    # --- faults --------------------------------------------------------------------------------

    def _make(self, fault: Fault, victim: Host) -> float:
        """Make a fault; return the moment after which training counts as training again."""
        make = getattr(self, f"_make_{fault.kind}")
        began = time.monotonic()
        return float(make(fault, victim) or began)

    def _make_kill_rank(self, fault: Fault, victim: Host) -> None:
        self._signal_rank(victim, signal.SIGKILL, fault.chance[1])

    def _make_raise_in_rank(self, fault: Fault, victim: Host) -> None:
        self._signal_rank(victim, signal.SIGUSR1, fault.chance[1])

    def _make_hang_rank(self, fault: Fault, victim: Host) -> None:
        self._signal_rank(victim, signal.SIGSTOP, fault.chance[1])

    def _make_two_ranks(self, fault: Fault, victim: Host) -> None:
        others = [host for host in self._working() if host is not victim]
        self._signal_rank(victim, signal.SIGKILL, fault.chance[1])
        self._signal_rank(others[int(fault.chance[1] * len(others))], signal.SIGKILL, 0)

    def _make_kill_launcher(self, fault: Fault, victim: Host) -> None:
        self._launcher(victim).kill()
        self._lose(victim, fault)

    def _make_drain_launcher(self, fault: Fault, victim: Host) -> None:
        self._launcher(victim).terminate()
        self._lose(victim, fault)

    def _make_stop_launcher(self, fault: Fault, victim: Host) -> float:
        launcher = self._launcher(victim)
        launcher.send_signal(signal.SIGSTOP)
        return self._silence(fault, victim, lambda: launcher.send_signal(signal.SIGCONT))

    def _make_cut_link(self, fault: Fault, victim: Host) -> float:
        victim.cut(silently=True)
        return self._silence(fault, victim, victim.mend)

    def _make_power_off(self, fault: Fault, victim: Host) -> None:
        victim.power_off()
        self._lose(victim, fault)

    def _make_flap_link(self, _fault: Fault, victim: Host) -> float:
        self._gone[victim] = False
        began = time.monotonic()
        for _ in range(3):
            victim.cut(silently=True)
            time.sleep(CUT_FLAP_S)  # the length of the fault itself
            victim.mend()
            time.sleep(CUT_FLAP_S)
        self._stay_until(began + DECIDED_S)
        return time.monotonic()

    def _make_bad_link(self, _fault: Fault, victim: Host) -> float:
        self._gone[victim] = False
        began = time.monotonic()
        victim.delay(*BAD_LINK)
        time.sleep(BAD_LINK_S)  # the length of the fault itself
        victim.delay(0)
        self._stay_until(began + DECIDED_S)
        return time.monotonic()

    def _make_kill_monitor(self, _fault: Fault, victim: Host) -> None:
        for pid in victim.processes():
            if "_monitor" in command_of(pid):
                os.kill(pid, signal.SIGKILL)

    def _make_in_a_restart(self, fault: Fault, victim: Host) -> float | None:
        self._begin_restart(fault, victim)
        candidates = self._may_go(self.hosts)
        if fault.second == "kill_rank":
            names = {name for name, _ in self.watch.starts[self.watch.cycle].values()}
            candidates = [host for host in self.hosts if host.name in names]
        second = candidates[int(fault.chance[1] * len(candidates))]
        self._report(f"  then {fault.second} of {second} when {fault.stage}")
        made: float | None = getattr(self, f"_make_{fault.second}")(fault, second)
        return made

    def _make_kill_control(self, _fault: Fault, _victim: Host) -> float:
        marks = {host: len(self.job.log(host)) for host in self.hosts}
        self._stop_control()
        reached = self.watch.last_step
        self._wait(lambda: self.watch.last_step >= reached + 5, "training without a control plane")
        self._start_control()
        self._await_attached(marks)
        return time.monotonic()

    def _make_kill_control_in_a_restart(self, fault: Fault, victim: Host) -> None:
        self._begin_restart(fault, victim)
        self._stop_control()
        self._start_control()

    def _begin_restart(self, fault: Fault, victim: Host) -> None:
        """Kill a rank and wait for a moment of the restart that follows."""
        before = self.watch.cycle
        mark = len(self.job.log(victim))
        self._signal_rank(victim, signal.SIGKILL, fault.chance[1])
        reached = {
            "stopping": lambda: "restarting because" in self.job.log(victim)[mark:],
            "starting": lambda: self.watch.cycle > before,
            "first_step": lambda: self.watch.steps.get(before + 1),
        }
        self._wait(reached[fault.stage], f"the restart is at {fault.stage}")

    def _silence(self, fault: Fault, victim: Host, end: Callable[[], None]) -> float:
        """Let a silence last as long as it is to; return when it has had its consequences."""
        began = time.monotonic()
        self._gone[victim] = fault.length_s >= SURELY_LOST_S
        self._stay_until(began + fault.length_s)
        end()
        self._stay_until(max(began + DECIDED_S, time.monotonic() + LEASE_S))
        return time.monotonic()

    def _stay_until(self, moment: float) -> None:
        """Wait for a moment, with an eye on the others."""
        self._wait(lambda: time.monotonic() >= moment, "a moment")

    # --- launchers and the control plane -------------------------------------------------------

    def _launcher(self, host: Host) -> HostProcess:
        return self.job.launchers[host.name]

    def _start(self, hosts: list[Host]) -> None:
        for host in hosts:
            self._log_from[host.name] = len(self.job.log(host))
            self._gone.pop(host, None)
        endpoint = f"{(self.control_host or self.hosts[0]).name}:{PORT}"
        self.job.start(
            *("--steps", str(NEVER), "--step-ms", str(STEP_MS), "--client"),
            hosts=hosts,
            nnodes=NNODES,
            nproc=NPROC,
            max_restarts=10_000,
            endpoint=endpoint,
            flags=FLAGS,
        )

    def _lose(self, host: Host, fault: Fault) -> None:
        """Take note that a launcher ends; start another one now or when the others train."""
        self._gone[host] = True
        if fault.at_once:
            self._wait(lambda: self._launcher(host).poll() is not None, f"{host} is left")
            self._replace(host)

    def _replace(self, host: Host) -> None:
        """Start another launcher where one has ended."""
        self._left_with[host.name] = code = self._launcher(host).wait(0)
        assert code in LEAVES_WITH, f"{host} left with {code}\n{self.job.tails()}"
        if not host.is_up:
            host.boot()
        self._start([host])

    def _start_control(self) -> None:
        host = self.control_host
        assert host is not None
        self._controls += 1
        self.control = self.job.start_other(
            host,
            [
                *(sys.executable, "-m", CONTROL, "--nnodes", NNODES, "--rdzv-id", self.job.id),
                *("--rdzv-endpoint", f"{host.name}:{PORT}"),
            ],
            f"control-{self._controls}",
        )

    def _stop_control(self) -> None:
        assert self.control is not None
        self.control.kill()
        self.control.wait(10)

    def _await_attached(self, marks: dict[Host, int]) -> None:
        for host, mark in marks.items():
            self._wait(
                lambda host=host, mark=mark: "the store is back" in self.job.log(host)[mark:],
                f"{host} has found the new control plane",
            )

    def _wait_until_whole(self) -> None:
        """Start launchers that are missing, and wait until all are part of the job again."""
        for host, must_leave in list(self._gone.items()):
            if must_leave or any(line in self._log(host) for line in LEAVES):
                self._wait(
                    lambda host=host: self._launcher(host).poll() is not None, f"{host} is left"
                )
                with contextlib.suppress(AssertionError):
                    wait_until(lambda host=host: not host.processes(), "", GONE_WITHIN_S)
                left = [command_of(pid) for pid in host.processes()]
                assert not left, f"left on {host}: {left}\n{self.job.tails()}"
                self._replace(host)
        self._gone.clear()
        for host in self.hosts:
            self._wait(lambda host=host: self._is_part(host), f"{host} is part of the job")

    def _is_part(self, host: Host) -> bool:
        """Say whether the present launcher of a host works or it is a spare."""
        log = self._log(host)
        works = f"cycle {self.watch.cycle}: "
        return any(line in log for line in (*WAITS, works))

    def _log(self, host: Host) -> str:
        """Return what the present launcher of a host has said."""
        return self.job.log(host)[self._log_from[host.name] :]

    # --- waiting -------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], object], what: str) -> float:
        """Wait until a condition holds; fail when a launcher leaves that has no reason to."""

        def checked() -> object:
            self.watch.update()
            if value := condition():
                return value
            for host in self.hosts:
                code = self._launcher(host).poll()
                assert code is None or host in self._gone, (
                    f"the launcher on {host.name} left with {code}: {what}\n{self.job.tails()}"
                )
            return None

        value = wait_until(checked, lambda: f"{what}\n{self.job.tails()}", DEADLINE_S)
        return float(value) if isinstance(value, (int, float)) else 0.0
