# SPDX-License-Identifier: Apache-2.0
"""What a job's host runs: it follows rounds, survives its host, and tells nodes what holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvidia_resiliency_ext.fault_tolerance import launcher
from nvidia_resiliency_ext.fault_tolerance._agent.run_files import (
    CycleRecords,
    cycle_info_environment,
)
from nvidia_resiliency_ext.fault_tolerance._config.attribution import AttributionConfig
from nvidia_resiliency_ext.fault_tolerance._hosting import attribution as hosting_attribution
from nvidia_resiliency_ext.fault_tolerance._hosting import services as log_token
from nvidia_resiliency_ext.fault_tolerance._hosting.services import (
    CoordinatorServices,
    ServicesPlan,
)
from nvidia_resiliency_ext.fault_tolerance._logs.sinks import FunnelSink
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import LogPlan
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan, plan_from_args
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop

ACTIVE = [Arrival("n1_1_0", "a1", "n1"), Arrival("n2_1_0", "n2")]
WAITING = [Arrival("n3_1_0", "a3", "n3")]


def content(folder: Path, cycle: int) -> dict[str, str]:
    """Return what the file about a cycle says."""
    said: dict[str, str] = json.loads((folder / f"cycle_info.j.0.{cycle}").read_text())
    return said


@contextlib.contextmanager
def services(
    folder: Path, *, job_goes_on: bool = False, **plan: Any
) -> Iterator[CoordinatorServices]:
    """Run what a host runs, with cycle information in the folder; then let it go."""
    clock = SystemClock()
    loop = EventLoop(clock)
    asked = ServicesPlan(
        fault_tol_cfg=FaultToleranceConfig(cycle_info_dir=str(folder)),
        cycle_info_job_id="j",
        **plan,
    )
    where = {"address": "127.0.0.1", "host": "host", "run_dir": str(folder)}
    made = CoordinatorServices(asked, {}, loop, clock, **where, is_shared=True)
    try:
        yield made
    finally:
        made.close(job_goes_on=job_goes_on)
        loop.close()


def test_a_cycle_outlives_its_host(tmp_path: Path) -> None:
    """A host that goes leaves the cycle open; the next one goes on with its file and ends it."""
    with services(tmp_path, job_goes_on=True) as first:
        first.begins(4, ACTIVE, WAITING)
    before = content(tmp_path, 4)
    assert (before["cycle_end_time"], before["standby_nodes"]) == ("", "n3")
    with services(tmp_path) as second:
        second.begins(4, ACTIVE, goes_on=True)
        second.ended(4)
        second.ended(4)
    after = content(tmp_path, 4)
    assert after["cycle_end_time"] > ""
    assert after | {"cycle_end_time": "", "generation": "0"} == before
    assert after["generation"] == "1"


def test_a_cycle_that_was_ended_too_early_goes_on(tmp_path: Path) -> None:
    """The next host takes the end back, which was that of its host only."""
    with services(tmp_path) as first:
        first.begins(0, ACTIVE, WAITING)
    assert content(tmp_path, 0)["cycle_end_time"] > ""
    with services(tmp_path, job_goes_on=True) as second:
        second.begins(0, ACTIVE, goes_on=True)
    assert (content(tmp_path, 0)["cycle_end_time"], content(tmp_path, 0)["generation"]) == ("", "2")


def test_a_cycle_without_a_file_gets_one(tmp_path: Path) -> None:
    """A host whose predecessor wrote nothing describes the cycle itself; an end alone is none."""
    with services(tmp_path, job_goes_on=True) as made:
        made.ended(2)
        made.begins(3, ACTIVE, goes_on=True)
    assert content(tmp_path, 3)["active_nodes"] == "n[1-2]"
    assert os.readlink(tmp_path / "cycle_info.j.current") == "cycle_info.j.0.3"
    assert not (tmp_path / "cycle_info.j.0.2").exists()


def test_a_cycle_left_open_by_a_host_that_died_is_ended(tmp_path: Path) -> None:
    """A round that ended while nobody served has an end in its file, as soon as one serves."""
    with services(tmp_path, job_goes_on=True) as first:
        first.begins(0, ACTIVE, WAITING)
    with services(tmp_path) as second:
        second.ended(0)
        second.begins(1, ACTIVE, WAITING)
    assert "" < content(tmp_path, 0)["cycle_end_time"] <= content(tmp_path, 1)["cycle_start_time"]


def stand_in(made: list[dict[str, Any]]) -> type:
    """Return a class for a part of attribution: its settings are appended to `made`."""

    class Part:
        def __init__(self, _: object, **settings: Any) -> None:
            made.append(settings)

        def start(self) -> None: ...
        def close(self, *, asks: bool) -> None: ...

    return Part


def follow_attribution(
    plan: ServicesPlan, environ: dict[str, str], folder: Path, *, is_shared: bool
) -> None:
    """Let the services of a rendezvous host follow attribution, and close them."""
    clock = SystemClock()
    where = {"address": "127.0.0.1", "host": "host", "run_dir": str(folder)}
    with contextlib.closing(EventLoop(clock)) as loop:
        host = CoordinatorServices(plan, environ, loop, clock, **where, is_shared=is_shared)
        host.follow_attribution(lambda _: None, lambda *_: None)
        host.close()


@pytest.mark.parametrize(
    ("is_shared", "named", "job"), [(True, None, "77"), (False, None, "77_1"), (True, "j", "j")]
)
def test_job_is_the_array_where_its_tasks_may_meet(
    is_shared: bool, named: str | None, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that takes a job of many nodes over asks about the same one; others ask about own."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(hosting_attribution, "AttributionWatch", stand_in(asked))
    monkeypatch.setenv("SLURM_JOB_ID", "79")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "77")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    plan = ServicesPlan(
        logs=LogPlan(applog_prefix=str(tmp_path / "log")),
        attribution=AttributionConfig("http://127.0.0.1:9"),
        cycle_info_job_id=named,
        job_name="name",
    )
    follow_attribution(plan, {}, tmp_path, is_shared=is_shared)
    assert [settings["job_id"] for settings in asked] == [job]


@pytest.mark.parametrize(
    ("environ", "token"),
    [({}, "/job"), ({"NVRX_ATTRSVC_TOKEN_FILE": "/service"}, "/service")],
)
def test_the_managed_service_asks_for_the_token_that_it_is_sent(
    environ: dict[str, str], token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token file of the job, or of the service, no other user of the host is answered."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(hosting_attribution, "AttributionManager", stand_in(made))
    monkeypatch.setattr(hosting_attribution, "AttributionWatch", stand_in(made))
    plan = ServicesPlan(
        logs=LogPlan(applog_prefix=str(tmp_path / "log")),
        attribution=AttributionConfig("localhost"),
        fault_tol_cfg=FaultToleranceConfig(rdzv_token_file="/job"),
    )
    follow_attribution(plan, environ, tmp_path, is_shared=True)
    manager, watch = made
    assert manager["environ"]["NVRX_ATTRSVC_TOKEN_FILE"] == watch["token_file"] == token


def test_ranks_in_files_are_those_of_the_scheduler(tmp_path: Path) -> None:
    """Where a node has none, its place in the round counts."""
    with services(tmp_path) as made:
        made.begins(0, [Arrival("a_1_0", "a"), Arrival("b_1_0", "b", infra_rank=7)])
    assert (content(tmp_path, 0)["active_nodes"], content(tmp_path, 0)["active_ranks"]) == (
        "a,b",
        "0,7",
    )


# What nodes are told of log servers -----------------------------------------------------------


def test_a_token_is_the_users_or_made(tmp_path: Path) -> None:
    """A file that was named is used; else one is made that nobody else may read."""
    given = {"NVRX_LOG_FUNNEL_TOKEN_FILE": "/a"}
    assert log_token.token_file(given, "/b", str(tmp_path)) == ("/a", True)
    assert log_token.token_file({}, "/b", str(tmp_path)) == ("/b", True)
    path, is_given = log_token.token_file({}, None, str(tmp_path))
    assert not is_given
    assert path == str(tmp_path / "log_token")


def test_a_host_without_log_servers_says_so(tmp_path: Path) -> None:
    """Nodes need not wait to find out."""
    with services(tmp_path) as made:
        assert made.log_token == log_token.NO_SERVER


@pytest.fixture
def launch(tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> LaunchPlan:
    """Return the plan of a launcher that sends its logs to the job's host."""
    script = tmp_path / "train.py"
    script.write_text("")
    words = ["--nnodes=2", "--rdzv-endpoint=c:1", "--ft-enable-log-server=1"]
    words += [f"--ft-per-cycle-applog-prefix={tmp_path}/job.log", "--ft-cycle-info-dir=/i"]
    return plan_from_args(launcher.parse_args([*words, str(script)]), {})


@pytest.mark.parametrize(
    ("said", "is_given", "calls", "token"),
    [
        (["t1"], False, ["again"], "t1"),
        (["t1", "t2"], False, ["again", "again"], "t2"),
        (["t1", None], False, ["again"], "t1"),
        ([log_token.NO_SERVER], False, ["files"], None),
        ([None], False, ["files"], None),
        ([None, None], False, ["files"], None),
        ([log_token.IN_A_FILE], False, ["files"], None),
        ([log_token.IN_A_FILE], True, [], None),
        ([log_token.NO_SERVER], True, ["files"], None),
    ],
)
def test_a_node_does_what_the_host_says_of_log_servers(  # noqa: PLR0913, PLR0917 - a table
    launch: LaunchPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: list[str | None],
    is_given: bool,
    calls: list[str],
    token: str | None,
) -> None:
    """A token is kept and used at once; without a server that fits, files are written here."""
    done: list[str] = []
    monkeypatch.setattr(FunnelSink, "write_files_instead", lambda _: done.append("files"))
    monkeypatch.setattr(FunnelSink, "try_again", lambda _: done.append("again"))
    place = types.SimpleNamespace(host="n1", run_dir=types.SimpleNamespace(path=str(tmp_path)))
    environ = {"NVRX_LOG_FUNNEL_TOKEN_FILE": "/given"} if is_given else {}
    job: Any = types.SimpleNamespace(plan=launch, environ=environ, paths=place)
    records = CycleRecords(job, "c", is_host=False)
    assert records.asks_for_log_server
    for one in said:
        records.log_server_said(one)
    assert done == calls
    path = tmp_path / "log_token"
    assert (path.read_text() if path.exists() else None) == token
    assert token is None or stat.S_IMODE(path.stat().st_mode) == 0o600
    records.close()


def test_workers_know_the_file_that_the_host_writes(
    launch: LaunchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's name in it is the flag's, else the scheduler's."""
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    variable = "NVRX_CURRENT_CYCLE_INFO"
    assert cycle_info_environment(launch) == {variable: "/i/cycle_info.31.current"}
    named = dataclasses.replace(launch, cycle_info_job_id="j7")
    assert cycle_info_environment(named) == {variable: "/i/cycle_info.j7.current"}
