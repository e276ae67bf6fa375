# SPDX-License-Identifier: Apache-2.0
"""Both fault tolerance callbacks in real Lightning trainings, with a real rank monitor."""

import contextlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import ranks_of_node
import torch

ft = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance")

import ports  # noqa: E402 - after the packages that may be missing
from lightning_jobs import SmallModule, trainer  # noqa: E402

from nvidia_resiliency_ext.ptl_resiliency import (  # noqa: E402
    FaultToleranceCallback,
    FaultToleranceSectionsCallback,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

SECTIONS = {"setup": 60.0, "step": 60.0, "checkpointing": 60.0}


@pytest.fixture
def monitor(socket_folder, clean_environment):
    """Return a function that starts a monitor and points the environment at it."""
    started = []
    port = contextlib.ExitStack()
    clean_environment.setenv("MASTER_PORT", str(port.enter_context(ports.claimed())))

    def start(**config):
        path = str(socket_folder / f"m{len(started)}.sock")
        # This process is the rank: timeouts learned from steps of a few ms must not end it.
        usual = {"rank_section_timeouts": SECTIONS, "safety_factor": 10_000.0}
        cfg = ft.FaultToleranceConfig(**{**usual, **config})
        started.append(ft.RankMonitorServer.run_in_subprocess(cfg, path))
        clean_environment.setenv("FT_RANK_MONITOR_IPC_SOCKET", path)
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}.items():
            clean_environment.setenv(name, str(value))
        clean_environment.setenv("MASTER_ADDR", "127.0.0.1")
        return started[-1]

    yield start
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for process in started:
        process.terminate()
        process.join(20.0)
    port.close()


def newest(tmp_path):
    """Return the newest checkpoint below a test's folder."""
    return max((tmp_path / "ckpt").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_timeouts_are_learned_and_used_by_the_next_run(tmp_path, monitor, clean_environment):
    """A run that loads and saves writes heartbeat timeouts, the next loads them; one callback."""
    flag = tmp_path / "finished"
    clean_environment.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    monitor()
    callback = FaultToleranceCallback(autoresume=True, calculate_timeouts=True)
    state = tmp_path / "ft_state" / "_ft_state.json"

    trainer(tmp_path, [callback], max_epochs=5, max_steps=4).fit(SmallModule())
    assert not state.exists(), "a run that loaded nothing has measured no load"
    assert flag.exists()
    flag.unlink()

    job = trainer(tmp_path, [callback], max_steps=8)
    job.fit(SmallModule(), ckpt_path=newest(tmp_path))
    written = json.loads(state.read_text())
    assert written["current_timeouts"]["heartbeat"]["were_calculated"]
    assert not callback.is_initialized
    assert callback.fault_tol_client is None

    loaded = []
    module = SmallModule(lambda _step: loaded.append(callback.fault_tol_client.hb_timeouts))
    trainer(tmp_path, [callback], max_steps=10).fit(module, ckpt_path=newest(tmp_path))
    assert loaded[0].were_calculated
    assert loaded[0].subsequent == written["current_timeouts"]["heartbeat"]["subsequent"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"current_timeouts": {"hear',
        b"[1]",
        b'{"x": 1}',
        b'{"current_timeouts": {"heartbeat": {"strange": 1}}}',
    ],
)
def test_a_broken_timeouts_file_is_put_aside(tmp_path, monitor, content):
    """A truncated or foreign file of timeouts is renamed with a warning, and the job trains."""
    monitor()
    path = tmp_path / "_ft_state.json"
    path.write_bytes(content)
    callback = FaultToleranceCallback(False, calculate_timeouts=True, exp_dir=tmp_path)
    job = trainer(tmp_path, [callback], max_steps=2, limit_val_batches=0)
    job.fit(SmallModule())
    assert job.global_step == 2
    assert not path.exists()
    assert (tmp_path / "_ft_state.json.corrupt").read_bytes() == content


def test_sections_of_a_training(tmp_path, monitor):
    """Each section is open at its time, also in a second fit, and the methods are given back."""
    monitor(rank_out_of_section_timeout=60.0)
    callback = FaultToleranceSectionsCallback(autoresume=False, calculate_timeouts=True)
    callback.MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE = 2
    seen, measured = [], []

    def look(_step):
        calc = callback.fault_tol_client.timeouts_calc
        seen.append(set(calc.open_sections))
        measured.append({name for name, longest in calc.section_to_max_time.items() if longest > 0})

    path = None
    for count in (6, 12):
        job = trainer(tmp_path, [callback], max_steps=count)
        job.fit(SmallModule(look), ckpt_path=path)
        assert job.global_step == count
        assert "training_step" not in vars(job.strategy)
        assert "save_checkpoint" not in vars(job.strategy)
        path = newest(tmp_path)
    assert seen == [{"step"}] * 12
    assert measured[0] == {"setup", "step"}, "the sanity check has validated"
    assert measured[-1] == {"setup", "step", "checkpointing"}
    state = json.loads((tmp_path / "ft_state" / "_ft_state_.json").read_text())
    section = state["current_timeouts"]["section"]
    assert sorted(section["calculated_sections"]) == sorted(SECTIONS)
    assert section["is_out_of_section_calculated"]


@pytest.mark.parametrize("kind", [FaultToleranceCallback, FaultToleranceSectionsCallback])
def test_the_users_exception_comes_through(tmp_path, monitor, kind):
    """An exception in a step reaches the user, closes the session, and a second fit works."""
    process = monitor(monitor_loss="fatal", rank_out_of_section_timeout=60.0,
                      initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=60.0)  # fmt: skip
    callback = kind(autoresume=False, calculate_timeouts=False)

    def fail(step):
        if step == 2:
            process.kill()  # so that nothing that the callback says is heard any more
            process.join(20.0)
            raise KeyError("of the user")

    job = trainer(tmp_path, [callback])
    with pytest.raises(KeyError, match="of the user"):
        job.fit(SmallModule(fail))
    assert not callback.is_initialized
    assert "training_step" not in vars(job.strategy)
    monitor(rank_out_of_section_timeout=60.0,
            initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=60.0)  # fmt: skip
    again = trainer(tmp_path, [callback], max_steps=2)
    again.fit(SmallModule())
    assert again.global_step == 2


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_a_lost_monitor(tmp_path, monitor, policy, caplog):
    """A monitor that is killed costs one warning by default, and the step if that was asked for."""
    process = monitor(
        monitor_loss="fatal", initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=60.0
    )
    callback = FaultToleranceCallback(False, calculate_timeouts=False, on_monitor_loss=policy)

    def kill(step):
        if step == 2:
            process.kill()
            process.join(20.0)
            client = callback.fault_tol_client
            deadline = time.monotonic() + 30.0
            while client._words is not None and time.monotonic() < deadline:
                time.sleep(0.01)  # the client's thread sees the end of the connection

    job = trainer(tmp_path, [callback])
    if policy == "raise":
        with pytest.raises(ft.RankMonitorClientError):
            job.fit(SmallModule(kill))
        return
    with caplog.at_level(logging.WARNING):
        job.fit(SmallModule(kill))
    assert job.global_step == 6
    assert caplog.text.count("the rank monitor is lost") == 1


def test_a_monitor_is_found_again(tmp_path, monitor, caplog):
    """After a new monitor has taken the place of a lost one, heartbeats go on, with one line."""
    config = {"initial_rank_heartbeat_timeout": 60.0, "rank_heartbeat_timeout": 60.0}
    process = monitor(monitor_loss="fatal", **config)
    callback = FaultToleranceCallback(False, calculate_timeouts=False)
    deadline = time.monotonic() + 60.0

    def replace(step):
        session = callback._session
        if step == 2:
            process.kill()
            process.join(20.0)
            while session.client._words is not None and time.monotonic() < deadline:
                time.sleep(0.01)
        if step == 3:
            assert not session.is_connected
            monitor(monitor_loss="fatal", **config)
            while time.monotonic() < min(session._retry_at, deadline):
                time.sleep(0.01)
        if step == 4:
            assert session.is_connected

    job = trainer(tmp_path, [callback])
    with caplog.at_level(logging.WARNING):
        job.fit(SmallModule(replace))
    assert job.global_step == 6
    assert caplog.text.count("the rank monitor is lost") == 1
    assert caplog.text.count("connected to a rank monitor again") == 1


HEARTBEAT_HOOKS = {
    "on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start",
    "on_train_batch_end", "on_validation_start", "on_validation_batch_end", "on_validation_end",
    "on_save_checkpoint", "on_load_checkpoint", "on_train_end", "on_train_epoch_end", "teardown",
}  # fmt: skip


def test_hooks_that_send_heartbeats(tmp_path, monitor, monkeypatch):
    """Each hook that may come after a long time sends one; a least interval drops the others."""
    monitor()
    hooks = []
    send = ft.RankMonitorClient.send_heartbeat

    def note(client):
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name not in HEARTBEAT_HOOKS:
            frame = frame.f_back
        hooks.append(frame and frame.f_code.co_name)
        return send(client)

    monkeypatch.setattr(ft.RankMonitorClient, "send_heartbeat", note)
    callback = FaultToleranceCallback(False, calculate_timeouts=True)
    trainer(tmp_path, [callback], max_steps=4).fit(SmallModule())
    again = trainer(tmp_path, [callback], max_steps=40)
    again.fit(SmallModule(), ckpt_path=newest(tmp_path))
    assert set(hooks) == HEARTBEAT_HOOKS
    hooks.clear()
    rare = FaultToleranceCallback(False, calculate_timeouts=True, min_heartbeat_interval=3600.0)
    trainer(tmp_path, [rare], max_steps=4).fit(SmallModule())
    assert len(hooks) == 1


@pytest.mark.parametrize(
    ("how", "is_complete", "is_learned"),
    [("last step", True, True), ("stopped early", False, True), ("exit 0", False, True),
     ("exit 1", False, False), ("error", False, False)],
)  # fmt: skip
def test_how_a_run_ends(tmp_path, monitor, clean_environment, how, is_complete, is_learned):
    """Only the last step completes the training; a clean stop still calculates timeouts."""
    flag = tmp_path / "finished"
    clean_environment.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    monitor()
    callback = FaultToleranceCallback(autoresume=True, calculate_timeouts=True)
    trainer(tmp_path, [], max_steps=2).fit(SmallModule())
    job = trainer(tmp_path, [callback], max_steps=8)

    def at_step(step):
        if step == 6 and how == "stopped early":
            job.should_stop = True
        elif step == 6 and how.startswith("exit"):
            raise SystemExit(int(how[-1]))
        elif step == 6 and how == "error":
            raise KeyError("of the user")

    raised = {"exit 0": SystemExit, "exit 1": SystemExit, "error": KeyError}.get(how)
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        job.fit(SmallModule(at_step), ckpt_path=newest(tmp_path))
    assert flag.exists() == is_complete
    assert (tmp_path / "ft_state" / "_ft_state.json").exists() == is_learned
    assert not callback.is_initialized


def run_two_ranks(case, folder, sockets):
    """Run both ranks, each with a monitor; return what they printed."""
    config = ft.FaultToleranceConfig(
        monitor_loss="fatal", initial_rank_heartbeat_timeout=300.0, rank_heartbeat_timeout=300.0
    )
    program = Path(__file__).parent / "helpers" / "two_ranks.py"
    monitors = []
    with contextlib.ExitStack() as stack:
        port = str(stack.enter_context(ports.claimed()))
        for rank in range(2):
            path = str(sockets / f"rank{rank}.sock")
            monitors.append(ft.RankMonitorServer.run_in_subprocess(config, path))
            stack.callback(monitors[-1].join, 20.0)
            stack.callback(monitors[-1].terminate)
        values = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                  "TORCHELASTIC_RUN_ID": "two"}  # fmt: skip
        logs = folder / "logs"
        logs.mkdir()
        ranks = stack.enter_context(ranks_of_node.started(
            logs, 2, program, [case, str(folder), str(sockets)], values,
            ["lightning.pytorch", "torch._dynamo.utils"],
        ))  # fmt: skip
        deadline = time.monotonic() + 150.0
        while ranks.are_running() and time.monotonic() < deadline:
            if (folder / "kill").exists():
                monitors[1].kill()
            time.sleep(0.02)
        words = [(logs / f"rank{rank}.log").read_text() for rank in range(2)]
        assert not ranks.are_running(), f"a rank waits for the other; they said {words}"
        assert ranks.wait() == [0, 0], words
        return [text.splitlines()[-1] for text in words]


def test_a_rank_without_monitor_leaves_out_no_collective(tmp_path, socket_folder, monitor):
    """Both ranks end although one has lost its monitor, and no timeouts are calculated."""
    ended = run_two_ranks("unwatched", tmp_path, socket_folder)
    assert ended == ["8 steps"] * 2
    assert not (tmp_path / "ft_state" / "_ft_state.json").exists()


def test_a_failure_of_rank_0_is_one_of_all_ranks(tmp_path, socket_folder, monitor):
    """A directory that rank 0 cannot make ends `fit` on both ranks, with the reason."""
    (tmp_path / "ft_state").write_text("no directory")
    first, second = run_two_ranks("blocked", tmp_path, socket_folder)
    assert first.startswith("FileExistsError")
    assert second.startswith("RuntimeError: rank 0 cannot use the file of timeouts (FileExists")


def test_what_is_refused_at_the_start(tmp_path, monitor, clean_environment):
    """A setting that cannot work ends `fit` with an error that names it, and leaves no session."""
    monitor()
    cases = [
        (FaultToleranceCallback(True, True), RuntimeError, "FAULT_TOL_FINISHED_FLAG_FILE"),
        (FaultToleranceCallback(False, False), RuntimeError, "calculate_timeouts"),
        (FaultToleranceCallback(False, True, exp_dir="/no/such"), ValueError, "/no/such"),
    ]
    for callback, error, text in cases:
        with pytest.raises(error, match=text):
            trainer(tmp_path, [callback]).fit(SmallModule())
        assert not callback.is_initialized
    monitor(rank_section_timeouts={"step": 1.0})
    with pytest.raises(ValueError, match="checkpointing"):
        trainer(tmp_path, [FaultToleranceSectionsCallback(False, True)]).fit(SmallModule())
    clean_environment.delenv("FT_RANK_MONITOR_IPC_SOCKET")
    with pytest.raises(ft.RankMonitorClientError, match="ft_launcher"):
        trainer(tmp_path, [FaultToleranceCallback(False, True)]).fit(SmallModule())


def test_a_policy_speaks_to_the_launcher(tmp_path, socket_folder, monitor, clean_environment):
    """What the policy returns is sent to the launcher; shutdown also makes the flag file."""
    from nvidia_resiliency_ext.fault_tolerance.ipc_connector import IpcConnector

    flag = tmp_path / "finished"
    clean_environment.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    launcher = IpcConnector(str(socket_folder / "launcher.sock"))
    launcher.start_receiving()
    clean_environment.setenv("FT_LAUNCHER_IPC_SOCKET", str(socket_folder / "launcher.sock"))
    monitor(rank_out_of_section_timeout=60.0)
    request = ft.WorkloadControlRequest(ft.WorkloadAction.ShutdownWorkload, "seen enough")
    answers = iter([request, "nonsense"])
    callback = FaultToleranceSectionsCallback(
        False, calculate_timeouts=False, exc_handling_policy=lambda _error: next(answers)
    )

    def fail(_step):
        raise ValueError("of the user")

    try:
        with pytest.raises(ValueError, match="of the user"):
            trainer(tmp_path, [callback]).fit(SmallModule(fail))
        assert flag.exists()
        deadline = time.monotonic() + 30.0
        received = []
        while not received and time.monotonic() < deadline:
            received = launcher.fetch_received()
            time.sleep(0.01)
        assert received == [(0, request)]
        with pytest.raises(TypeError, match="nonsense"):
            trainer(tmp_path, [callback]).fit(SmallModule(fail))
        assert not callback.is_initialized
    finally:
        launcher.stop_receiving()


def test_a_simulated_fault_is_cancelled_at_the_end(tmp_path, monitor):
    """A fault that is still to come when the training ends does not happen."""
    monitor()
    before = signal.getsignal(signal.SIGTERM)
    fault = {"fault_type": "SIGTERM", "base_delay": 3600.0, "rank_to_fail": 0}
    callback = FaultToleranceCallback(False, True, simulated_fault_params=fault)
    handles = []
    module = SmallModule(lambda _step: handles.append(callback._fault))
    trainer(tmp_path, [callback], max_steps=1).fit(module)
    assert handles[0].cancelled
    assert signal.getsignal(signal.SIGTERM) == before
