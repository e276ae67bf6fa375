# SPDX-License-Identifier: Apache-2.0
"""Where each second went: recorded jobs with known times, and the sums that must come out."""

import random
from dataclasses import replace

import pytest
from recorded_job import BEGIN, RecordedJob

from nvidia_resiliency_ext.shared_utils._events import kinds as event_kinds
from nvidia_resiliency_ext.shared_utils._events.read import EventRecord
from nvidia_resiliency_ext.shared_utils._report.timeline import Span, coarsen
from nvidia_resiliency_ext.shared_utils.events import (
    CkptLoad,
    CkptSave,
    CycleEnd,
    CycleStart,
    Dropped,
    Fault,
    FirstStep,
    InprocRestart,
    JobEnd,
    JobStart,
    Phase,
    Progress,
    Straggler,
    WorkerExit,
    WorkerStart,
)
from nvidia_resiliency_ext.shared_utils.report import build_timeline, render_prometheus


def _seconds(*jobs: RecordedJob) -> dict[str, float]:
    timeline = build_timeline([job.file() for job in jobs])
    found = {name: round(value, 6) for name, value in timeline.seconds.items() if value}
    assert sum(found.values()) == pytest.approx(timeline.wall_s)
    return found


def _quiet() -> RecordedJob:
    job = RecordedJob().at(0, JobStart(), None).at(2, Phase(name="rendezvous", dur_s=1.0))
    return job.at(2, CycleStart(world_size=1, reason="start")).at(2, WorkerStart(warm=True), rank=0)


def _killed() -> RecordedJob:
    """Steps from 10 to 50, killed at 50 and noticed at 51, steps again from 60 to 100."""
    job = _quiet().at(10, FirstStep(dur_s=8.0), rank=0)
    job.at(51, Fault(cause="killed", what="signal 9", late_s=1.0), rank=0)
    job.at(54, Phase(name="stop", dur_s=3.0)).at(54, CycleEnd(result="failed"))
    job.at(55, Phase(name="rendezvous", dur_s=1.0), 1)
    job.at(55, CycleStart(world_size=1, reason="killed"), 1).at(60, FirstStep(), 1, rank=0)
    return job.at(100, CycleEnd(result="success"), 1).at(
        100, JobEnd(result="success", exit_code=0, restarts=1), None
    )


@pytest.mark.parametrize("huge", [10**400, -(10**400), 1e308], ids=["more", "less", "float"])
def test_times_that_no_clock_has(huge: float) -> None:
    """A header or an event whose clock says nonsense is read as one that says nothing."""
    expected = build_timeline([_quiet().file()]).seconds
    for clock in ({"wall": huge, "mono": 1.0}, {"wall": huge, "mono": huge}):
        job = _quiet()
        job.header["clock"] = clock
        assert build_timeline([job.file()]).seconds == pytest.approx(expected)
    job = _quiet().at(1, CycleStart(clock_off_s=huge))
    build_timeline([job.file()])


def test_undisturbed_job() -> None:
    """Without a fault, all time from the first step to the end is productive."""
    job = _quiet().at(10, FirstStep(dur_s=8.0), rank=0)
    job.at(100, CycleEnd(result="success")).at(100, JobEnd(result="success", exit_code=0), None)
    assert _seconds(job) == {"productive": 90, "startup": 9, "rendezvous": 1}
    timeline = build_timeline([job.file()])
    assert timeline.goodput == pytest.approx(0.9)
    assert timeline.is_ended
    assert (timeline.result, timeline.exit_code, timeline.job_id) == ("success", 0, "7")
    assert timeline.notes == ()


def test_a_clock_that_is_off_moves_nothing() -> None:
    """The events of a node whose clock was found to be off are where those of the others are."""
    right, wrong = _killed(), RecordedJob("n2", launch_id="b")
    wrong.at(302, CycleStart(world_size=2, clock_off_s=300.2)).at(310, FirstStep(), rank=1)
    wrong.at(354, CycleEnd(result="failed"))
    wrong.at(355, CycleStart(world_size=2, clock_off_s=299.8), 1).at(359, FirstStep(), 1, rank=1)
    wrong.at(400, CycleEnd(result="success"), 1).at(400, JobEnd(result="success"), None)
    timeline = build_timeline([right.file(), wrong.file()])
    assert timeline.wall_s == pytest.approx(100, abs=0.5)
    assert [round(cycle.start - BEGIN) for cycle in timeline.cycles] == [2, 55]
    assert timeline.seconds["productive"] == pytest.approx(80, abs=1)


def test_restart_after_a_kill() -> None:
    """A restart is detection, stop, rendezvous and start-up; work that was not saved is unknown."""
    job = _killed()
    assert _seconds(job) == {
        "productive": 80, "detection": 1, "stop": 3, "rendezvous": 2, "startup": 14,
    }  # fmt: skip
    timeline = build_timeline([job.file()])
    (restart,) = timeline.restarts
    assert (restart.layer, restart.cycle, restart.cause, restart.rank) == ("in-job", 1, "killed", 0)
    assert restart.down_s == pytest.approx(10)
    assert restart.phases == pytest.approx({"stop": 3.0, "rendezvous": 1.0, "first step": 5.0})
    assert restart.lost_s is None
    (note,) = (note for note in timeline.notes if "upper bound" in note)
    assert "CkptSave" in note


def test_lost_work_and_stall() -> None:
    """Work since the begin of the last finished save is lost, and a save's stall is no work."""
    job = _killed()
    job.at(30, CkptSave(id="a", stall_s=2.0, write_s=5.0, result="ok"), rank=0)
    assert _seconds(job) == {
        "productive": 55, "lost_work": 23, "checkpoint_stall": 2, "detection": 1, "stop": 3,
        "rendezvous": 2, "startup": 14,
    }  # fmt: skip
    timeline = build_timeline([job.file()])
    assert timeline.restarts[0].lost_s == pytest.approx(25)
    assert timeline.checkpoints.saved == 1
    assert timeline.goodput == pytest.approx(0.55)


def test_save_that_failed_keeps_nothing() -> None:
    """A failed save, and one that not all ranks finished, leave the work before them unsaved."""
    job = _killed()
    for rank in (0, 1):
        job.at(20, CkptSave(id="a", write_s=0.0, result="ok"), rank=rank)
        job.at(40, CkptSave(id="c", error="disk full"), rank=rank)
    job.at(30, CkptSave(id="b", write_s=0.0, result="ok"), rank=0)
    assert _seconds(job)["lost_work"] == 30
    checkpoints = build_timeline([job.file()]).checkpoints
    assert (checkpoints.saved, checkpoints.failed) == (1, 1)


def test_older_checkpoint_loaded() -> None:
    """When the job goes on from an older checkpoint, all work after that one is lost."""
    job = _killed()
    job.at(20, CkptSave(id="a", write_s=0.0), rank=0).at(40, CkptSave(id="b", write_s=0.0), rank=0)
    assert _seconds(job)["lost_work"] == 10
    job.at(58, CkptLoad(id="a"), 1, rank=0)
    assert _seconds(job)["lost_work"] == 30


def test_work_is_lost_once() -> None:
    """A second fault before any new save does not lose the first one's work again."""
    job = _killed()
    job.at(20, CkptSave(id="a", write_s=0.0), rank=0)
    job.at(80, Fault(cause="killed", late_s=0.0), 1, rank=0)
    found = _seconds(job)
    assert found["lost_work"] == 30 + 20
    assert found["productive"] == 10


def test_lost_work_from_iterations() -> None:
    """Without checkpoint events, an iteration that goes back tells what was lost."""
    job = _killed()
    for number in range(1, 5):
        job.at(10 + 10 * number, Progress(iteration=number * 10, steps=10, window_s=10.0), rank=0)
    # Rank 0 went on until the fault, which the monitor had recorded before.
    job.at(51.5, Progress(iteration=41, steps=1, window_s=1.5), rank=0)
    job.at(70, Progress(iteration=30, steps=10, window_s=10.0), 1, rank=0)
    assert _seconds(job)["lost_work"] == 20


def test_hang_counts_from_the_last_sign_of_life() -> None:
    """For a hang, detection is the whole deadline, from the last heartbeat to the verdict."""
    job = _quiet().at(10, FirstStep(), rank=0)
    job.at(81, Fault(cause="hang_heartbeat", deadline_s=30.0, late_s=1.0), rank=0)
    job.at(85, CycleEnd(result="failed")).at(85, JobEnd(result="failed", exit_code=1), None)
    found = _seconds(job)
    assert (found["productive"], found["detection"], found["unknown"]) == (40, 31, 4)


def test_in_process_restart() -> None:
    """An in-process restart stops productive time for its phases only, reported once per rank."""
    job = _quiet().at(10, FirstStep(), rank=0)
    job.at(50, Fault(cause="exception", late_s=0.0), rank=1)
    phases = {"abort": 1.0, "barrier": 2.0, "health": 3.0}
    for rank in range(4):
        restart = InprocRestart(iteration=1, cause="exception", phases=phases)
        job.at(56 + rank / 10, restart, rank=rank)
    job.at(100, CycleEnd(result="success")).at(100, JobEnd(result="success"), None)
    timeline = build_timeline([job.file()])
    assert timeline.restarts_by_layer == {"in-process": 1, "in-job": 0}
    assert timeline.restarts[0].phases == phases
    assert timeline.restarts[0].down_s == pytest.approx(6.3)
    assert timeline.seconds["productive"] == pytest.approx(90 - 6.3)
    assert timeline.seconds["unknown"] == pytest.approx(0)


def test_in_process_restart_counts_as_its_fault() -> None:
    """A restart of which no other event tells is a fault, too, and costs the work thrown away."""
    job = _quiet().at(10, FirstStep(), rank=0)
    for number in range(1, 5):
        at = 10 + 10 * number
        job.at(at, Progress(iteration=10 * number, steps=10, window_s=10.0), rank=0)
    text = "Interruption.HARD_TIMEOUT on ranks={2}"
    phases = {"detect": 4.0, "abort": 1.0, "barrier": 1.0}
    job.at(56, InprocRestart(call=0, iteration=0, cause=text, ranks=[2], phases=phases), rank=0)
    job.at(66, Progress(iteration=30, steps=10, window_s=9.0), rank=0)  # goes on from 20
    job.at(100, CycleEnd(result="success")).at(100, JobEnd(result="success"), None)
    timeline = build_timeline([job.file()])
    (fault,) = timeline.faults
    assert (fault.cause, fault.rank, fault.what) == ("hang_heartbeat", 2, text)
    assert (fault.onset, fault.at) == (50 + BEGIN, 54 + BEGIN)
    assert timeline.seconds["lost_work"] == pytest.approx(20)  # from 30, when step 20 was done
    assert timeline.restarts[0].lost_s == pytest.approx(20)
    assert timeline.seconds["productive"] == pytest.approx(90 - 6 - 20)


@pytest.mark.parametrize("calls", [(0, 1), (None, None)], ids=["numbered", "older record"])
def test_in_process_restarts_of_two_calls(calls: tuple[int | None, ...]) -> None:
    """Each wrapped call counts its restarts from 0: those of two calls are two."""
    job = _quiet().at(10, FirstStep(), rank=0)
    for at, call in zip((30, 60), calls, strict=True):
        restart = InprocRestart(call=call, iteration=0, cause="0:EXCEPTION", phases={"abort": 1.0})
        job.at(at, restart, rank=0)
    job.at(100, CycleEnd(result="success")).at(100, JobEnd(result="success"), None)
    timeline = build_timeline([job.file()])
    assert timeline.restarts_by_layer["in-process"] == 2
    assert len(timeline.faults) == 2


def test_no_heartbeat_means_unknown() -> None:
    """A script that reports no step has unknown, not productive time, and is told how to change."""
    job = _quiet().at(100, CycleEnd(result="success")).at(100, JobEnd(result="success"), None)
    timeline = build_timeline([job.file()])
    assert timeline.goodput is None
    assert timeline.seconds["productive"] == 0
    assert timeline.seconds["unknown"] == pytest.approx(98)
    assert any("send_heartbeat" in note for note in timeline.notes)


def test_job_that_never_got_to_a_step() -> None:
    """In a job that reports steps, a cycle without any was start-up until its fault."""
    job = _quiet().at(12, Fault(cause="exited", late_s=0.0), rank=0)
    job.at(12, CycleEnd(result="failed")).at(12, CycleStart(world_size=1), 1)
    job.at(20, FirstStep(), 1, rank=0).at(30, CycleEnd(result="success"), 1)
    assert _seconds(job) == {"startup": 19, "rendezvous": 1, "productive": 10}


def test_killed_launcher() -> None:
    """A record without an end stops at its last event and says so."""
    job = _quiet().at(10, FirstStep(), rank=0).at(40, Progress(iteration=3), rank=0)
    timeline = build_timeline([job.file()])
    assert not timeline.is_ended
    assert timeline.wall_s == pytest.approx(40)
    assert any("no end" in note for note in timeline.notes)


def _lost_launcher() -> list[RecordedJob]:
    """Return a job of three launchers on one machine; the second is killed at 40."""
    nodes = [RecordedJob("n1", launch_id=name) for name in "abc"]
    for number, job in enumerate(nodes):
        job.at(number * 0.1, JobStart(), None)
        job.at(1, CycleStart(world_size=3, reason="start")).at(10, FirstStep(), rank=number)
    nodes[1].at(40, Progress(iteration=30), rank=1)
    for number in (0, 2):
        job = nodes[number].at(55, Fault(cause="node_lost", what="host n1 is lost"))
        job.at(56, CycleEnd(result="restart")).at(57, CycleStart(world_size=2), 1)
        job.at(60, FirstStep(), 1, rank=number)
    return nodes


def test_job_with_a_lost_launcher_ends() -> None:
    """It ends when all others have, for the lost one never tells its end."""
    nodes = _lost_launcher()
    assert not build_timeline([job.file() for job in nodes]).is_ended
    nodes[0].at(100, CycleEnd(result="success"), 1).at(100, JobEnd(result="success"), None)
    assert not build_timeline([job.file() for job in nodes]).is_ended
    nodes[2].at(101, CycleEnd(result="success"), 1)
    nodes[2].at(101, JobEnd(result="success", exit_code=0), None)
    timeline = build_timeline([job.file() for job in nodes])
    assert timeline.is_ended
    assert (timeline.result, timeline.exit_code) == ("success", 0)
    assert any("n1" in note and "lost" in note for note in timeline.notes)
    assert not any("record has no end" in note for note in timeline.notes)
    running = [line for line in render_prometheus(timeline).splitlines() if "job_running " in line]
    assert running[-1] == "nvrx_job_running 0"


@pytest.mark.parametrize("how", ["the store is lost", "the job is over"])
def test_job_ends_without_a_launcher_that_nobody_recorded_as_lost(how: str) -> None:
    """The host of the store, a spare node or, under min-healthy, any node may be missing."""
    nodes = [RecordedJob("n1", launch_id=name) for name in "abc"]
    for number, job in enumerate(nodes):
        job.at(number * 0.1, JobStart(), None)
        job.at(1, CycleStart(world_size=3, reason="start")).at(10, FirstStep(), rank=number)
    nodes[1].at(40, Progress(iteration=30), rank=1)
    is_over = True if how == "the job is over" else None
    for number in (0, 2):
        job = nodes[number]
        if is_over is None:
            job.at(55, Fault(cause="store_lost", what="the store is lost"))
        job.at(100, JobEnd(result="over", exit_code=1, is_over=is_over), None)
    timeline = build_timeline([job.file() for job in nodes])
    assert timeline.is_ended
    assert any("n1" in note and "lost" in note for note in timeline.notes)
    nodes[1].at(90, Progress(iteration=40), rank=1)
    assert not build_timeline([job.file() for job in nodes]).is_ended


def test_job_goes_on_without_a_node_that_lost_the_store() -> None:
    """A node that is cut off leaves; the others, which write nothing while they wait, do not."""
    nodes = [RecordedJob("n1", launch_id=name) for name in "abc"]
    for number, job in enumerate(nodes):
        job.at(number * 0.1, JobStart(), None)
        job.at(1, CycleStart(world_size=3, reason="start")).at(10, FirstStep(), rank=number)
    nodes[2].at(50, Fault(cause="store_lost", what="the store is lost"))
    nodes[2].at(53, JobEnd(result="the store is lost", exit_code=1), None)
    assert not build_timeline([job.file() for job in nodes]).is_ended


def test_launcher_that_was_taken_for_lost_and_writes_again_is_waited_for() -> None:
    """Whoever wrote after the loss was noticed was not lost."""
    nodes = _lost_launcher()
    nodes[1].at(70, CycleStart(world_size=3), 1)
    for job in (nodes[0], nodes[2]):
        job.at(100, JobEnd(result="success"), None)
    assert not build_timeline([job.file() for job in nodes]).is_ended


def test_nodes_share_one_account() -> None:
    """What two nodes do at the same time is counted once; phases are those of the slower node."""
    nodes = [RecordedJob("n1", launch_id="a"), RecordedJob("n2", launch_id="b")]
    for number, job in enumerate(nodes):
        job.at(0, CycleStart(world_size=2, reason="start")).at(10, FirstStep(), rank=number)
        job.at(50 + 2 * number, Phase(name="stop", dur_s=2.0 * number)).at(52, CycleEnd(result="f"))
        job.at(55, CycleStart(world_size=2), 1).at(60, FirstStep(), 1, rank=number)
        job.at(100, CycleEnd(result="success"), 1).at(100, JobEnd(result="success"), None)
    nodes[0].at(50, Fault(cause="killed", late_s=0.0), rank=0)
    assert _seconds(*nodes) == {"startup": 15, "productive": 80, "stop": 2, "unknown": 3}
    timeline = build_timeline([job.file() for job in nodes])
    assert timeline.hosts == ("n1", "n2")
    assert len(timeline.cycles) == 2
    assert timeline.restarts[0].phases["stop"] == pytest.approx(2)
    assert [lane.label for lane in timeline.nodes] == ["n1", "n2"]


def test_second_launch_begins_at_cycle_zero_again() -> None:
    """Cycle 0 of a later launch is another cycle, and the time between is unknown."""
    first, second = _killed(), RecordedJob(launch_id="b")
    second.at(200, JobStart(), None).at(200, CycleStart(world_size=1)).at(210, FirstStep(), rank=0)
    second.at(250, CycleEnd(result="success")).at(250, JobEnd(result="success"), None)
    timeline = build_timeline([second.file(), first.file()])
    assert [(cycle.launch, cycle.number) for cycle in timeline.cycles] == [(0, 0), (0, 1), (1, 0)]
    assert timeline.seconds["unknown"] == pytest.approx(100)
    assert timeline.restarts_by_layer["in-job"] == 1


def test_step_of_the_wall_clock() -> None:
    """A wall clock that is set back or forward in the middle changes no duration."""
    straight, stepped = _killed().file(), _killed()
    stepped.records[6:] = [replace(record, t=record.t - 5000) for record in stepped.records[6:]]
    assert build_timeline([stepped.file()]).seconds == build_timeline([straight]).seconds


def test_lanes_of_ranks() -> None:
    """Each rank has its own lane with start-up, steps and faults, clipped to its life."""
    job = _killed().at(54, WorkerExit(signal=9), rank=0)
    lane = build_timeline([job.file()]).lanes[0]
    assert lane.rank == 0
    assert [fault.cause for fault in lane.faults] == ["killed"]
    told = [(span.name, span.start - BEGIN, span.end - BEGIN) for span in lane.spans]
    assert told[:4] == [
        ("startup", 2, 10), ("productive", 10, 50), ("detection", 50, 51), ("stop", 51, 54),
    ]  # fmt: skip
    assert lane.spans[0].note == "warm start"


def test_remarks_and_counts() -> None:
    """Stragglers, dropped events and the ways in which workers started are told."""
    job = _killed().at(20, Straggler(ranks=[3], reason="slow"), rank=None)
    job.at(21, Dropped(count=5, why="full"), None)
    job.at(55, WorkerStart(warm=False, cold_reason="no standby"), 1, rank=0)
    timeline = build_timeline([job.file()])
    assert [remark.kind for remark in timeline.remarks] == ["straggler", "dropped"]
    assert timeline.dropped == 5
    assert (timeline.workers.warm, timeline.workers.cold) == (1, 1)
    assert timeline.workers.cold_reasons == {"no standby": 1}
    assert timeline.faults_by_cause == {"killed": 1}


def test_nothing_recorded() -> None:
    """Files with headers only give an empty timeline, not an error."""
    timeline = build_timeline([RecordedJob().file()])
    assert (timeline.wall_s, timeline.goodput, timeline.hosts) == (0, None, ("n1",))


def test_any_events_at_all() -> None:
    """Events in any order with any values give a timeline whose seconds add up to the whole."""
    chance = random.Random(7)
    known = (getattr(each, "kind", "") for each in vars(event_kinds).values())
    kinds = [*filter(None, known), "strange"]
    values: list[object] = [None, "", "x", -1, 0, 1, 2.5, 1e14, 1e300, True, [], [1, "a"], {"a": 2}]
    names = "dur_s late_s deadline_s cause name result id iteration stall_s write_s phases steps"
    for _ in range(150):
        job = RecordedJob()
        for _ in range(chance.randrange(1, 40)):
            at = chance.choice([chance.uniform(0, 100), chance.uniform(-1e9, 1e9), 5.0])
            record = EventRecord(
                t=BEGIN + at,
                m=chance.choice([None, at]),
                kind=chance.choice(kinds),
                src="x",
                cycle=chance.choice([None, 0, 1, 2, -5]),
                rank=chance.choice([None, 0, 1, -1]),
                pid=1,
                fields={name: chance.choice(values) for name in names.split()},
            )
            job.records.append(record)
        timeline = build_timeline([job.file()])
        assert sum(timeline.seconds.values()) == pytest.approx(timeline.wall_s, abs=1e-3)
        assert min(timeline.seconds.values()) >= 0


def test_coarse_lanes_keep_their_shares() -> None:
    """A lane of very many spans is drawn with few that show what took most of each part."""
    spans = [Span(n, n + (0.9 if n < 500 else 0.2), "productive") for n in range(1000)]
    spans += [Span(span.end, n + 1, "stop") for n, span in enumerate(spans)]
    drawn = coarsen(spans, 0, 1000, 100)
    assert [(span.start, span.end, span.name) for span in drawn] == [
        (0, 500, "productive"),
        (500, 1000, "stop"),
    ]
    assert coarsen(spans[:5], 0, 1000, 100) == spans[:5]
