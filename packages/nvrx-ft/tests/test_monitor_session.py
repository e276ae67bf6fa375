# SPDX-License-Identifier: Apache-2.0
"""A rank's session as a table: phases, events, effects; no process, no socket and no clock."""

import signal
from types import SimpleNamespace

import pytest
from slot_writer import SlotWriter

from nvidia_resiliency_ext.fault_tolerance._monitor import session as sessions
from nvidia_resiliency_ext.fault_tolerance._monitor.messages import Hello
from nvidia_resiliency_ext.fault_tolerance._monitor.port import RankPort
from nvidia_resiliency_ext.fault_tolerance._monitor.session import Phase, RankSession
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import SlotLayout
from nvidia_resiliency_ext.fault_tolerance._monitor.timeout_rules import Verdict
from nvidia_resiliency_ext.shared_utils.rank_activity import Kernel

LAYOUT = SlotLayout(("step",))
T0 = 100.0
DUMP = 39


class Process:
    """A process that does not react to signals."""

    pid = 4711

    def __init__(self, effects):
        self.effects = effects
        self.is_alive = True

    def alive(self):
        return self.is_alive

    def fileno(self):
        return None

    def signal(self, number):
        self.effects.append(number)

    def close(self):
        """Hold nothing."""


class Lab:
    """A session whose effects are written down, at times that the test chooses."""

    def __init__(self, sig="SIGKILL", evidence_s=2.0):
        self.now = T0
        self.effects = []
        self.saved = []
        self.can_dump = True
        self.opened_at = None
        nothing = lambda *_, **__: None  # noqa: E731
        server = SimpleNamespace(
            host="h",
            cycle=0,
            record_dir="",
            loop=SimpleNamespace(watch=nothing, unwatch=nothing),
            slow=SimpleNamespace(submit=self._submit),
            notify_launcher=lambda message: self.effects.append(type(message).__name__),
            open_inquiry=lambda _: self.effects.append("open_inquiry"),
            take_evidence=lambda _: self.effects.append("take_evidence"),
        )
        config = {
            "initial_rank_heartbeat_timeout": None,
            "rank_heartbeat_timeout": None,
            "rank_section_timeouts": {"step": 1.0},
            "rank_out_of_section_timeout": None,
            "num_warmup_iterations": 5,
            "workload_check_interval": 5.0,
            "hang_evidence_timeout": evidence_s,
            "rank_termination_signal": sig,
        }
        self.process = Process(self.effects)
        self.port = SimpleNamespace(
            server=server,
            config=config,
            local_rank=0,
            view=self._view,
            lines=SimpleNamespace(alive=nothing, lost=nothing),
        )
        channel = SimpleNamespace(close=nothing)
        hello = Hello(rank=0, pid=4711, dump_signal=DUMP)
        self.session = RankSession(self.port, channel, hello, self.process, 1)

    def _submit(self, _job, done):
        self.effects.append("save")
        self.saved.append(lambda: done((1, "path")))

    def _view(self):
        writer = SlotWriter(LAYOUT, int(T0 * 1e9))
        if self.opened_at is not None:
            writer.open("step", int(self.opened_at * 1e9))
        return writer.view()

    def do(self, event, at, *args, opened_at=None):
        """Give the session an event and return its effects."""
        self.now, self.opened_at = at, opened_at
        before = len(self.effects)
        getattr(self.session, event)(*args)
        return [e for e in self.effects[before:] if e != "FirstStep"]

    def says(self, data, at):
        """Let a piece of the stacks come."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sessions.os, "read", lambda *_: data)
            self.do("_read_dump", at)

    @property
    def state(self):
        return self.session.phase, self.session.wake_at


@pytest.fixture
def make(monkeypatch):
    """Return what makes a session that was just opened; the newest one has the clock."""
    labs = []
    monkeypatch.setattr(sessions, "monotonic", lambda: labs[-1].now if labs else T0)
    monkeypatch.setattr(sessions, "inspect_kernel", lambda _: Kernel("S"))
    monkeypatch.setattr(sessions, "can_dump", lambda *_: labs[-1].can_dump)

    def made(**settings):
        labs.append(Lab(**settings))
        return labs[-1]

    return made


def suspected(lab, opened_at=T0 + 1):
    """Return it after the first look that broke a rule."""
    lab.session.wake_at = T0 + 5
    assert lab.do("wake", T0 + 5, opened_at=opened_at) == []
    return lab


def asked(lab):
    """Return it when its verdict stands and its stacks are waited for."""
    assert suspected(lab).do("wake", T0 + 5.01, opened_at=T0 + 1) == [DUMP, "open_inquiry"]
    return lab


def saving(lab):
    """Return it when its verdict stands and it cannot write stacks."""
    lab.can_dump = False
    assert suspected(lab).do("wake", T0 + 5.01, opened_at=T0 + 1) == ["save", "open_inquiry"]
    return lab


def received(lab):
    """Return it when the evidence is complete."""
    saving(lab).saved.pop()()
    assert lab.effects[-1] == "take_evidence"
    return lab


def live(lab):
    return lab


def test_a_healthy_look_sleeps_until_the_next_deadline(make):
    """A look that breaks no rule sets the time of the next one."""
    lab = make()
    assert lab.do("wake", T0 + 0.6, opened_at=T0 + 0.5) == []
    assert lab.state == (Phase.LIVE, pytest.approx(T0 + 1.5))


def test_nobody_is_signalled_on_one_look(make):
    """The first look that breaks a rule only asks for a second one soon after."""
    phase, wake_at = suspected(make()).state
    assert phase is Phase.SUSPECT
    assert T0 + 5 < wake_at < T0 + 5.1


def test_progress_between_the_looks_acquits(make):
    """A rank that moved on between the two looks is not touched."""
    lab = suspected(make())
    assert lab.do("wake", T0 + 5.01) == []
    assert (lab.session.phase, lab.session.verdict) == (Phase.LIVE, None)


def test_another_verdict_needs_looks_of_its_own(make):
    """A second look that finds another reason counts as a first look for that reason."""
    lab = suspected(make())
    assert lab.do("wake", T0 + 5.01, opened_at=T0 + 2) == []
    assert lab.session.phase is Phase.SUSPECT


def test_a_monitor_that_was_frozen_gives_the_ranks_time(make):
    """When the monitor wakes far too late, thawing ranks get a second before the second look."""
    lab = make()
    lab.do("wake", T0, opened_at=T0)
    lab.do("wake", T0 + 60, opened_at=T0)
    assert lab.state == (Phase.SUSPECT, T0 + 61)


def test_the_whole_way_of_a_hang_with_stacks(make):
    """Verdict, stacks, evidence, report, kill, and the end with the process."""
    lab = asked(make())
    lab.says(b"stacks", T0 + 6.1)
    lab.says(b"\n", T0 + 6.2)
    assert lab.state == (Phase.DUMPING, pytest.approx(T0 + 6.225))
    assert lab.do("wake", T0 + 6.23) == ["save"]
    lab.saved.pop()()
    assert (lab.session.phase, lab.effects[-1]) == (Phase.RECEIVED, "take_evidence")
    evidence = lab.session.evidence
    assert (evidence.stacks, evidence.stacks_path) == (b"stacks\n", "path")
    assert lab.do("terminate", T0 + 6.25) == [signal.SIGCONT, signal.SIGKILL]
    assert lab.session.phase is Phase.KILLING
    assert lab.do("end", T0 + 6.3) == ["RankLeft", "take_evidence"]
    assert (lab.state, lab.port.session) == ((Phase.OVER, None), None)


@pytest.mark.parametrize(("can_dump", "evidence_s"), [(False, 2.0), (True, 0.0)])
def test_who_cannot_dump_is_not_asked(make, can_dump, evidence_s):
    """A stopped rank, or evidence switched off: straight to what the kernel says."""
    lab = suspected(make(evidence_s=evidence_s))
    lab.can_dump = can_dump
    assert lab.do("wake", T0 + 5.01, opened_at=T0 + 1) == ["save", "open_inquiry"]
    assert lab.session.phase is Phase.SAVING


def test_a_dead_process_is_found_out_and_not_held_at_fault(make):
    """Whose process has ended meanwhile is not looked into."""
    lab = suspected(make())
    lab.process.is_alive = False
    assert lab.do("wake", T0 + 5.01, opened_at=T0 + 1) == ["RankLeft", "take_evidence"]


def test_silence_after_the_request_ends_with_the_limit(make):
    """Stacks that never come, or never end, hold up the kill no longer than configured."""
    lab = asked(make())
    end = pytest.approx(T0 + 7.01)
    assert lab.session.wake_at == end
    lab.says(b"\n", T0 + 7.0)
    assert lab.session.wake_at == end
    lab.says(b"more", T0 + 7.005)
    assert lab.session.wake_at == end


def test_a_slow_disk_does_not_hold_up_the_kill(make):
    """When the evidence is not written in time, it is complete all the same."""
    lab = saving(make())
    assert lab.do("wake", lab.session.wake_at) == ["take_evidence"]
    before = list(lab.effects)
    lab.saved.pop()()
    assert lab.effects == before


def test_evidence_of_an_earlier_hang_does_not_complete_that_of_a_later_one(make):
    """Evidence that is on disk late says nothing of what is gathered since."""
    lab = saving(make())
    lab.do("wake", lab.session.wake_at)
    lab.do("release", T0 + 6)
    lab.do("wake", T0 + 16)
    assert lab.do("gather_evidence", T0 + 17) == ["save"]
    lab.saved.pop(0)()
    assert lab.session.phase is Phase.SAVING
    lab.saved.pop(0)()
    assert lab.session.phase is Phase.RECEIVED


def test_escalation(make):
    """A gentle signal, then SIGKILL, then a report that nothing helps."""
    lab = received(make(sig="SIGTERM"))
    assert lab.do("terminate", T0 + 6) == [signal.SIGCONT, signal.SIGTERM]
    assert lab.state == (Phase.ENDING, T0 + 11)
    assert lab.do("wake", T0 + 11) == [signal.SIGKILL]
    assert lab.state == (Phase.KILLING, T0 + 16)
    assert lab.do("wake", T0 + 16) == ["RankUnkillable"]
    assert lab.state == (Phase.STUCK, None)
    assert lab.do("end", T0 + 99) == ["RankLeft", "take_evidence"]


def test_another_ranks_hang_is_looked_into_without_a_verdict(make):
    """A rank that broke no rule is looked at like one that did, and can be blamed or let go."""
    for event in ("terminate", "release"):
        lab = make()
        lab.can_dump = False
        assert lab.do("gather_evidence", T0 + 5) == ["save"]
        assert (lab.session.phase, lab.session.verdict) == (Phase.SAVING, None)
        lab.saved.pop()()
        effects = lab.do(event, T0 + 6)
        assert effects == ([signal.SIGCONT, signal.SIGKILL] if event == "terminate" else [])
    assert lab.session.phase is Phase.FREE
    lab.do("wake", lab.session.wake_at)
    assert lab.session.phase is Phase.LIVE


def ended(lab):
    """Return it without a session any more."""
    lab.do("end", T0 + 1)
    return lab


@pytest.mark.parametrize("state", [ended, received])
def test_who_cannot_be_looked_at_again_is_not_looked_at_twice(make, state):
    """Without a session, or while it is looked at, a second request changes nothing."""
    lab = state(make())
    before = lab.state
    assert (lab.do("gather_evidence", T0 + 9), lab.state) == ([], before)


@pytest.mark.parametrize("state", [live, suspected, asked, received])
def test_the_end_of_the_session_drops_the_suspicion(make, state):
    """A rank that ended its session is evaluated no more."""
    lab = state(make())
    assert lab.do("close", T0 + 6) == ["RankLeft", "take_evidence"]
    assert lab.state == (Phase.OVER, None)


def test_a_rank_at_fault_cannot_escape_by_closing(make):
    """After the verdict was carried out, closing the connection does not stop the escalation."""
    lab = received(make(sig="SIGTERM"))
    lab.do("terminate", T0 + 6)
    assert lab.do("close", T0 + 6.1) == []
    assert lab.state == (Phase.ENDING, T0 + 11)
    assert lab.do("wake", T0 + 11) == [signal.SIGKILL]


@pytest.mark.parametrize("event", ["end", "close", "wake", "terminate", "release"])
def test_after_its_end_does_nothing(make, event):
    """Without a session no event has an effect."""
    lab = ended(asked(make()))
    assert (lab.do(event, T0 + 9), lab.session.phase) == ([], Phase.OVER)


def test_late_answers_change_nothing(make):
    """An answer that belongs to an earlier phase is ignored."""
    lab = make()
    lab.says(b"stacks\n", T0 + 1)
    assert lab.state == (Phase.LIVE, T0)
    assert lab.do("terminate", T0 + 1) + lab.do("release", T0 + 1) == []
    late = ended(saving(make()))
    late.saved.pop()()
    assert late.effects[-1] == "take_evidence"
    assert late.session.phase is Phase.OVER


VERDICT = Verdict(
    rule="gpu_health", section=None, since=T0, limit_s=5.0, iteration=7, reason="GPU 0: reset"
)


@pytest.mark.parametrize("state", [live, suspected])
def test_a_rank_whose_device_is_unfit_is_ended_like_a_hung_one(make, state):
    """Evidence, report, then the signal: as for a hang, and without a second look."""
    lab = state(make())
    assert lab.do("hold_at_fault", T0 + 6, VERDICT) == [DUMP, "open_inquiry"]
    assert lab.session.verdict == VERDICT
    assert lab.do("wake", T0 + 8) == ["save"]


def test_a_rank_that_is_being_ended_is_not_held_at_fault_again(make):
    """One report per rank, whatever else is found."""
    lab = make()
    lab.do("hold_at_fault", T0 + 6, VERDICT)
    assert lab.do("hold_at_fault", T0 + 7, VERDICT) == []


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_second_process(make, monkeypatch, is_alive):
    """While its process lives another one is refused; a dead one is replaced at once."""
    lab = make()
    lab.process.is_alive = is_alive
    monkeypatch.setattr(lab.session, "read", lambda: None)
    said = []
    channel = SimpleNamespace(send=lambda message: said.append(type(message).__name__))
    channel.close = lambda: said.append("close")
    port = RankPort.__new__(RankPort)
    port.session, port.server, port.config = lab.session, lab.port.server, lab.port.config
    port.lines, port.local_rank, port.view = lab.port.lines, 0, lab.port.view
    port._last_session_id = 1
    port._record_refusal = said.append
    lab.session.port = port
    module = "nvidia_resiliency_ext.fault_tolerance._monitor.port"
    monkeypatch.setattr(f"{module}.PidHandle", lambda _: Process(lab.effects))
    monkeypatch.setattr(RankSession, "open", lambda session: said.append(session.session_id))
    port._let_in(SimpleNamespace(channel=channel, pid=4712), Hello(rank=0, pid=4712))
    if is_alive:
        assert said[1:] == ["Refused", "close"]
        assert port.session is lab.session
    else:
        assert said == [2]
        assert lab.session.phase is Phase.OVER
        assert port.session is not lab.session
