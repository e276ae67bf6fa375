# SPDX-License-Identifier: Apache-2.0
"""`RankMonitorServer`: the monitor that stands alone, in a process of its own and in ours."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from monitored_ranks import Rank, wait_gone, wait_until

from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorServer
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorLogger

CFG = FaultToleranceConfig(rank_section_timeouts={"step": 0.5})


@pytest.fixture
def ranks():
    """Return a function that starts a rank for a socket."""
    started = []

    def start(path, **env):
        started.append(Rank(path, 0, env))
        return started[-1]

    yield start
    for rank in started:
        rank.close()


@pytest.fixture
def process(socket_folder):
    """Return a monitor in a process of its own."""
    it = RankMonitorServer.run_in_subprocess(CFG, str(socket_folder / "m.sock"))
    yield it
    it.kill()
    it.join(20.0)


@contextlib.contextmanager
def stderr_to(path):
    """Let processes that are started meanwhile write their stderr to a file."""
    before = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_it_judges_like_the_launchers_monitor(process, ranks, socket_folder):
    """A hung rank is ended; the monitor goes on for the next one."""
    for _ in range(2):
        rank = ranks(socket_folder / "m.sock")
        rank.do_last("init", "open step")
        assert rank.wait_dead() == -signal.SIGKILL
    assert process.is_alive()
    assert process.exitcode is None


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_ends_it_in_order(process, sig, socket_folder):
    """SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 end it with code 0 and remove its socket."""
    os.kill(process.pid, sig)
    process.join(20.0)
    assert (process.exitcode, process.is_alive()) == (0, False)
    assert not (socket_folder / "m.sock").exists()


def test_its_socket_is_private(process, socket_folder):
    """Nobody but the user may connect, and the process carries no torch."""
    assert (socket_folder / "m.sock").stat().st_mode & 0o777 == 0o600
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps


def test_a_socket_that_is_served_is_not_taken_over(process, socket_folder):
    """A second monitor at the same path does not start, and the first one stays reachable."""
    with pytest.raises(RuntimeError, match="did not start"):
        RankMonitorServer.run_in_subprocess(CFG, str(socket_folder / "m.sock"))
    assert (socket_folder / "m.sock").exists()
    assert process.is_alive()


def test_a_stale_socket_is_replaced(socket_folder, ranks):
    """The socket that a killed monitor left behind is no obstacle for the next one."""
    for _ in range(2):
        process = RankMonitorServer.run_in_subprocess(CFG, str(socket_folder / "m.sock"))
        rank = ranks(socket_folder / "m.sock")
        rank.do("init")
        process.kill()
        process.join(20.0)
        assert process.exitcode == -signal.SIGKILL
        # Or it would come back to the next monitor, whose rank is another process.
        rank.close()


def test_it_ends_with_its_parent(socket_folder):
    """When the process that started it is killed, it goes within seconds."""
    code = (
        "import sys, time\n"
        "from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig as C\n"
        "from nvidia_resiliency_ext.fault_tolerance import RankMonitorServer as S\n"
        "print(S.run_in_subprocess(C(), sys.argv[1]).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(socket_folder / "m.sock")],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid = int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_gone(pid, 20.0)
    assert not (socket_folder / "m.sock").exists()


def test_the_lines_of_layered_restarts(socket_folder, ranks, tmp_path):
    """A restarter's monitor tells start, loss, recovery and end of its rank in order."""
    path, reported = str(socket_folder / "m.sock"), (tmp_path / "err").read_text
    cfg = FaultToleranceConfig(rank_section_timeouts={"step": 60.0}, restart_check_interval=0.2)
    # Not capfd: what is written while it empties its file is lost.
    with stderr_to(tmp_path / "err"):
        process = RankMonitorServer.run_in_subprocess(cfg, path, is_restarter_logger=True)
    try:
        ranks(path).do("init", "open step", "close step", "shutdown")
        # They come by time alone.
        wait_until(lambda: reported().count("state=handling stage=processing") >= 2)
        ranks(path).do("init", "beat")
    finally:
        process.terminate()
        process.join(20.0)
    out = reported()
    lines = [line.split("name=[InJob] ")[1] for line in out.splitlines() if "InJob" in line]
    assert lines[:2] == ["state=initialize", "state=handling stage=starting"], out
    assert lines.count("state=handling stage=processing") >= 2
    assert lines[-1] in ("state=finalized", "state=aborted")
    assert "state=handling stage=completed" in lines


def test_it_can_be_the_body_of_a_thread(socket_folder, ranks):
    """A server object serves in the calling process until it is told to leave."""
    ready = threading.Event()
    logger = RankMonitorLogger(is_restarter_logger=True)
    path = str(socket_folder / "m.sock")
    server = RankMonitorServer(CFG, path, ready, logger, True)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        assert ready.wait(20.0)
        rank = ranks(path)
        rank.do_last("init", "open step")
        assert rank.wait_dead() == -signal.SIGKILL
    finally:
        server.stop()
        thread.join(20.0)
    assert not thread.is_alive()
    assert not Path(path).exists()


def test_the_logger_names_the_rank(caplog):
    """Messages carry the connected rank, and restart lines only come when wanted."""
    caplog.set_level(logging.INFO, logger="nvrx")
    logger = RankMonitorLogger()
    logger.set_connected_rank(4)
    logger.warning("something")
    logger.log_restarter_event("not wanted")
    wanted = RankMonitorLogger(is_restarter_logger=True)
    wanted.log_restarter_event("wanted")
    assert [record.getMessage() for record in caplog.records] == ["something", "wanted"]
    assert caplog.records[0].connected_rank == 4


def test_readiness_is_quick(socket_folder):
    """A monitor for one rank is there soon: it does not wait for torch."""
    before = time.monotonic()
    process = RankMonitorServer.run_in_subprocess(CFG, str(socket_folder / "m.sock"))
    took = time.monotonic() - before
    loaded = Path(f"/proc/{process.pid}/maps").read_text()
    process.terminate()
    process.join(20.0)
    assert took < 10.0
    assert "python" in loaded
    assert "libtorch" not in loaded
