# SPDX-License-Identifier: Apache-2.0
"""`RankMonitorClient` as users call it, against a monitor that stands alone."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ft_workers import run_ranks

from nvidia_resiliency_ext.fault_tolerance import (
    FaultToleranceConfig,
    RankMonitorClient,
    RankMonitorClientError,
    RankMonitorServer,
    WorkloadAction,
    WorkloadControlRequest,
)
from nvidia_resiliency_ext.fault_tolerance.data import HeartbeatTimeouts, SectionTimeouts
from nvidia_resiliency_ext.fault_tolerance.ipc_connector import IpcConnector

pytestmark = pytest.mark.slow

STATE = {
    "current_timeouts": {
        "heartbeat": {"initial": 30.0, "subsequent": 20.0, "were_calculated": True},
        "section": {
            "section": {"step": 11.0, "gone": 5.0},
            "out_of_section": 12.0,
            "calculated_sections": ["gone", "step"],
            "is_out_of_section_calculated": True,
        },
    }
}


@pytest.fixture
def monitor(socket_folder, clean_environment):
    """Return a function that starts a monitor and points the environment at it."""
    started = []

    def start(**config):
        path = str(socket_folder / f"m{len(started)}.sock")
        cfg = FaultToleranceConfig(**{"rank_section_timeouts": {"step": 60.0}, **config})
        started.append(RankMonitorServer.run_in_subprocess(cfg, path))
        clean_environment.setenv("FT_RANK_MONITOR_IPC_SOCKET", path)
        clean_environment.setenv("RANK", "5")
        clean_environment.setenv("LOCAL_RANK", "0")
        return started[-1]

    yield start
    for process in started:
        process.terminate()
        process.join(20.0)
        assert process.exitcode in (0, -9)


@pytest.fixture
def client(monitor):
    """Return a client with a session."""
    monitor()
    it = RankMonitorClient()
    it.init_workload_monitoring()
    yield it
    it.shutdown_workload_monitoring()


def test_a_new_client_has_the_documented_attributes(clean_environment):
    """Before a session nothing is set, and nothing is connected."""
    it = RankMonitorClient()
    assert (it.is_initialized, it.iter_idx, it.chkpt_manager) == (False, 0, None)
    nothing = (
        it.rank_info,
        it.timeouts_calc,
        it.hb_timeouts,
        it.section_timeouts,
        it.loaded_hb_timeouts,
        it.loaded_section_timeouts,
        it.cfg,
        it.launcher_connector,
        it.rank_monitor_socket,
    )
    assert nothing == (None,) * 9
    assert it.CURRENT_TIMEOUTS_STATE_KEY == "current_timeouts"
    it.shutdown_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="FT_RANK_MONITOR_IPC_SOCKET is not set"):
        it.init_workload_monitoring()


def test_a_monitor_that_is_not_there_is_an_error(clean_environment, tmp_path):
    """A path at which nobody listens ends init with the client's error, and may be tried again."""
    clean_environment.setenv("FT_RANK_MONITOR_IPC_SOCKET", str(tmp_path / "nobody.sock"))
    clean_environment.setenv("RANK", "0")
    it = RankMonitorClient()
    for _ in range(2):
        with pytest.raises(RankMonitorClientError, match="no session with the rank monitor"):
            it.init_workload_monitoring()
    assert not it.is_initialized


def test_a_second_client_of_the_process_is_told_of_the_first(client):
    """It is no other process that has the session; after the first one's end it may have it."""
    second = RankMonitorClient()
    with pytest.raises(RankMonitorClientError, match="another client of this process"):
        second.init_workload_monitoring()
    with pytest.raises(TypeError, match="num_warmup_iters is a number of iterations, not 'x'"):
        second.init_workload_monitoring("x")
    client.shutdown_workload_monitoring()
    second.init_workload_monitoring()
    second.shutdown_workload_monitoring()


def test_a_session_gives_configuration_and_timeouts(client):
    """After init the server's configuration and timeouts are there, and init again is refused."""
    assert (client.is_initialized, client.rank_info.global_rank) == (True, 5)
    assert client.cfg.rank_section_timeouts == {"step": 60.0}
    assert client.hb_timeouts == HeartbeatTimeouts(None, None, were_calculated=False)
    assert client.section_timeouts == SectionTimeouts({"step": 60.0}, None)
    assert isinstance(client.rank_monitor_socket, socket.socket)
    with pytest.raises(RankMonitorClientError, match="initialised already"):
        client.init_workload_monitoring()


def test_a_session_can_be_ended_and_opened_again(client):
    """Shutdown refuses further calls; a new session starts with nothing open."""
    client.start_section("step")
    client.shutdown_workload_monitoring()
    client.shutdown_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="not initialised"):
        client.send_heartbeat()
    client.init_workload_monitoring()
    client.start_section("step")
    client.end_all_sections()
    client.end_all_sections()
    assert client.timeouts_calc.section_to_max_time["step"] > 0


def test_the_figures_are_up_to_date_when_read(client):
    """`timeouts_calc` shows the events that happened before it is read."""
    client.send_heartbeat()
    client.send_heartbeat()
    calc = client.timeouts_calc
    assert calc.count == 2
    assert calc.can_get_hb_timeouts()
    client.start_section("step")
    assert set(client.timeouts_calc.open_sections) == {"step"}


def test_state_before_and_after_init(monitor):
    """Loaded timeouts are kept until a session, then count here and in the monitor."""
    monitor(rank_heartbeat_timeout=99.0)
    it = RankMonitorClient()
    assert it.state_dict() == {"current_timeouts": {}}
    it.load_state_dict(json.loads(json.dumps(STATE)))
    assert it.state_dict() == STATE
    it.init_workload_monitoring()
    try:
        assert it.hb_timeouts == HeartbeatTimeouts(30.0, 20.0, were_calculated=True)
        assert it.section_timeouts.section == {"step": 11.0}, "sections that are gone are dropped"
        assert it.section_timeouts.out_of_section == 12.0
        assert json.loads(json.dumps(it.state_dict()))["current_timeouts"]["section"] == {
            "section": {"step": 11.0},
            "out_of_section": 12.0,
            "calculated_sections": ["step"],
            "is_out_of_section_calculated": True,
        }
        in_session = it.state_dict()
    finally:
        it.shutdown_workload_monitoring()
    assert it.state_dict() == in_session, "a checkpoint written after the end loses nothing"
    # The monitor keeps them for the rank's next session.
    again = RankMonitorClient()
    again.init_workload_monitoring()
    try:
        assert again.cfg.rank_heartbeat_timeout == 20.0
        assert again.cfg.rank_section_timeouts == {"step": 11.0}
    finally:
        again.shutdown_workload_monitoring()


def test_two_way_mode_waits_for_the_monitor(monitor):
    """With skip_section_response off each call is answered by the monitor."""
    monitor(skip_section_response=False)
    it = RankMonitorClient()
    it.init_workload_monitoring()
    try:
        for _ in range(20):
            it.send_heartbeat()
            with it.section("step"):
                pass
    finally:
        it.shutdown_workload_monitoring()


def test_control_requests_reach_the_launchers_mailbox(clean_environment, socket_folder):
    """A request goes out as (global rank, request); without a launcher it is an error."""
    with pytest.raises(RuntimeError, match="FT_LAUNCHER_IPC_SOCKET"):
        RankMonitorClient().send_workload_control_request(
            WorkloadControlRequest(WorkloadAction.ExcludeThisNode)
        )
    mailbox = IpcConnector(str(socket_folder / "launcher.sock"))
    mailbox.start_receiving()
    try:
        clean_environment.setenv("FT_LAUNCHER_IPC_SOCKET", mailbox.socket_path)
        clean_environment.setenv("RANK", "3")
        request = WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "enough")
        RankMonitorClient().send_workload_control_request(request)
        assert mailbox.fetch_received() == [(3, request)]
    finally:
        mailbox.stop_receiving()


def test_shutdown_does_not_wait_for_a_stopped_monitor(monitor):
    """Ending a session is quick even when the monitor does not run."""
    process = monitor()
    it = RankMonitorClient()
    it.init_workload_monitoring()
    os.kill(process.pid, 19)
    before = time.monotonic()
    it.shutdown_workload_monitoring()
    assert time.monotonic() - before < 20.0
    os.kill(process.pid, 18)


def test_the_package_loads_its_names_lazily():
    """Importing the package loads none of its parts, and the client no heavy module."""
    code = (
        "import sys, nvidia_resiliency_ext.fault_tolerance as ft\n"
        "parts = [m for m in sys.modules if m.startswith('nvidia_resiliency_ext.fault_tol')]\n"
        "assert len(parts) == 1, parts\n"
        "assert set(ft.__all__) <= set(dir(ft)) and len(ft.__all__) == 9\n"
        "ft.RankMonitorClient\n"
        "heavy = {'torch', 'numpy', 'psutil', 'grpc', 'yaml', 'asyncio', 'subprocess', 'uuid'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "for name in ft.__all__: getattr(ft, name)\n"
        "import types\n"
        "shown = {n for n in dir(ft) if not n.startswith('_')}\n"
        "modules = {n for n in shown if isinstance(getattr(ft, n), types.ModuleType)}\n"
        "assert shown - modules == set(ft.__all__), shown - modules\n"
        "assert 'torch' not in sys.modules\n"
        "try: ft.no_such_name\n"
        "except AttributeError: print('good')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("good\n", 0), done.stderr


def test_ranks_agree_on_calculated_timeouts(monitor, tmp_path):
    """Every rank and its monitor get the maximum over the ranks, and equal states."""
    sockets = []
    for _ in range(2):
        monitor(rank_section_timeouts={"step": 60.0, "rare": None}, safety_factor=2.0)
        sockets.append(os.environ["FT_RANK_MONITOR_IPC_SOCKET"])
    orders = [json.dumps({"socket": path, "step_s": 0.2 * n}) for n, path in enumerate(sockets, 1)]
    first, second = run_ranks("calculating_rank.py", orders, tmp_path)
    assert first["state"] == second["state"]
    section = first["state"]["current_timeouts"]["section"]
    assert 0.8 <= section["section"]["step"] < 20.0
    assert section["section"]["rare"] is None
    assert section["calculated_sections"] == ["step"]
    assert first["not_ready"] == [
        False,
        "timeouts cannot be calculated: too few sections were seen",
    ]
    assert first["monitor"] == [section["section"], section["out_of_section"]]


def test_a_program_with_megatrons_calls(monitor, tmp_path):
    """A program of our own that calls what Megatron-LM's integration calls, twice over a restart.

    It stands in for that module, whose source is not part of this repository. With a configuration
    that lacks a section which the program selects, it goes on without it.
    """
    limits = {"step": 60.0, "checkpointing": 60.0}
    words = []
    for name, sections in (("all", {"setup": 60.0, **limits}), ("some", limits)):
        monitor(rank_section_timeouts=sections, rank_out_of_section_timeout=60.0)
        (tmp_path / name).mkdir()
        words.append((os.environ["FT_RANK_MONITOR_IPC_SOCKET"], str(tmp_path / name)))
    program = Path(__file__).parent / "programs" / "megatron_calls.py"
    done = subprocess.run(
        [sys.executable, str(program), *words[0], *words[0], *words[1]],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, other = map(json.loads, done.stdout.splitlines())
    calculated = [
        state["current_timeouts"]["section"]["calculated_sections"] for state in (first, other)
    ]
    assert calculated == [["checkpointing", "setup", "step"], ["checkpointing", "step"]]
    assert second != first, "the second run merges its own measurements"
