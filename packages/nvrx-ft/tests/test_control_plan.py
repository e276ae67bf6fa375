# SPDX-License-Identifier: Apache-2.0
"""The command line of `nvrx-control`: what it takes, what it refuses, what follows from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import ports
import pytest
from rendezvous_store import PREFIX, Served

from nvidia_resiliency_ext.fault_tolerance import launcher
from nvidia_resiliency_ext.fault_tolerance._agent import many_nodes
from nvidia_resiliency_ext.fault_tolerance._agent.many_nodes import must_agree, rules_of
from nvidia_resiliency_ext.fault_tolerance._config.flags import FLAGS
from nvidia_resiliency_ext.fault_tolerance._control import plan, plane
from nvidia_resiliency_ext.fault_tolerance._control import plane as program
from nvidia_resiliency_ext.fault_tolerance._plan.plan import plan_from_args
from nvidia_resiliency_ext.fault_tolerance._rendezvous import keys
from nvidia_resiliency_ext.fault_tolerance._rendezvous.agreement import (
    differences,
    read_settings,
    write_settings,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import ForeignValueError
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, NvrxError

NEEDED = ("--nnodes=2:3", "--rdzv-endpoint=control1:29400")
APPLOG = "--ft-per-cycle-applog-prefix=/logs/job.log"
pytestmark = pytest.mark.usefixtures("clean_environment")


def made(*words: str) -> plan.ControlPlan:
    """Return the plan of a command line."""
    return plan.plan_of(plan.get_args_parser().parse_args([*NEEDED, *words]), os.environ)


def test_without_further_flags_only_the_store_is_served() -> None:
    """Nothing is collected, written or asked that nobody asked for."""
    found = made()
    assert (found.host, found.port) == ("control1", 29400)
    services = found.services
    assert (services.logs.server, services.fault_tol_cfg.cycle_info_dir) == (None, None)
    assert not services.attribution.is_enabled
    assert found.settings == {"--nnodes": "2:3"}


@pytest.mark.parametrize(
    ("words", "roots"),
    [
        ((APPLOG,), ("/logs",)),
        (("--ft-nvrx-logfile=/own/nvrx.log",), ("/own",)),
        (("--ft-log-server-log-prefix=/srv/log",), ("/srv",)),
        ((APPLOG, "--ft-nvrx-logfile=/own/nvrx.log"), ("/logs", "/own")),
        ((APPLOG, "--ft-enable-log-server=false"), None),
    ],
)
def test_log_servers_run_wherever_it_is_said_where_logs_are(
    words: tuple[str, ...], roots: tuple[str, ...] | None
) -> None:
    """They are on by default, and may write below the folders that were named."""
    logs = made(*words).services.logs
    assert (logs.server is not None, logs.roots if logs.server else None) == (
        roots is not None,
        roots,
    )


def test_everything_that_a_store_host_runs_can_be_asked_for(tmp_path: Path) -> None:
    """Each flag has its place in the plan."""
    key = tmp_path / "key"
    found = made(
        APPLOG, "--ft-log-server-port=6000", "--ft-log-aggregator-count=2",
        f"--ft-cycle-info-dir={tmp_path}", "--ft-cycle-info-job-id=j7",
        "--ft-attribution-endpoint=localhost", "--ft-attribution-stop-action=no-restart",
        "--ft-attribution-node-action=exclude", f"--ft-attribution-llm-api-key-file={key}",
        "--ft-bad-node-hook=true --x", "--ft-rdzv-token-file=/t", "--ft-no-restart-exit-code=9",
        "--ft-lease=1.5", "--ft-segment=2",
    )  # fmt: skip
    services = found.services
    assert services.logs.server is not None
    assert services.logs.server.ports.listen_ports() == (6000, 6001, 6002)
    assert (services.fault_tol_cfg.cycle_info_dir, services.cycle_info_job_id) == (
        str(tmp_path),
        "j7",
    )
    assert services.attribution.is_managed
    assert services.attribution.enforce_stop
    assert services.attribution.llm_api_key_file == str(key)
    assert services.fault_tol_cfg.attribution_node_action == "exclude"
    assert services.fault_tol_cfg.rdzv_token_file == "/t"
    assert services.fault_tol_cfg.bad_node_hook == "true --x"
    assert found.settings == {
        "--nnodes": "2:3",
        "--ft-segment": "2",
        "--ft-lease": "1.5",
        "--ft-no-restart-exit-code": "9",
        "--ft-log-server-port": "6000",
        "--ft-log-aggregator-count": "2",
        "--ft-per-cycle-applog-prefix": "/logs/job.log",
    }


def test_where_it_listens_and_what_launchers_must_have_alike_can_be_said() -> None:
    """The settings of the rendezvous that it goes by are compared with the launchers'."""
    conf = "--rdzv-conf=segment=2,replacement_group_size=4,last_call_timeout=3,is_host=0"
    found = made("--local-addr=10.0.0.9", conf)
    assert (made().address, found.address, found.host) == ("control1", "10.0.0.9", "control1")
    assert found.settings == {
        "--nnodes": "2:3",
        "--ft-segment": "2",
        "rdzv_conf replacement_group_size": "4",
        "rdzv_conf last_call_timeout": "3.0",
    }
    assert made(conf, "--ft-segment=1").settings["--ft-segment"] == "1"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--ft-enable-log-server=true",), "--ft-enable-log-server needs one of"),
        (("--ft-cycle-info-dir=/info",), "needs --ft-cycle-info-job-id"),
        (("--ft-cycle-info-dir=info", "--ft-cycle-info-job-id=a"), "no absolute path"),
        (("--ft-cycle-info-dir=/info", "--ft-cycle-info-job-id=a/b"), "part of a file name"),
        (("--ft-attribution-endpoint=localhost",), "needs --ft-per-cycle-applog-prefix"),
        ((APPLOG, "--ft-log-server-port=50050", "--ft-attribution-endpoint=localhost"), "50050"),
        (("--ft-log-server-log-prefix=srv",), "is no absolute path"),
        (("--ft-per-cycle-applog-prefix=job.log",), "--ft-per-cycle-applog-prefix"),
        ((APPLOG, "--ft-log-server-port=65535", "--ft-log-aggregator-count=2"), "65535"),
        (("--ft-bad-node-hook=no-such-program-1",), "--ft-bad-node-hook"),
        (("--rdzv-backend=etcd",), "--rdzv-backend"),
        (("--rdzv-backend=static",), "--rdzv-backend static"),
        (("--rdzv-conf=replacement_group_size=few",), "replacement_group_size='few'"),
        (("--nproc-per-node=2",), "--nproc-per-node=2 is no flag of nvrx-control"),
        (("train.py",), "runs no script"),
    ],
)
def test_what_cannot_be_is_one_line_and_code_2(
    words: tuple[str, ...], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line names the flag; nothing is started."""
    with pytest.raises(SystemExit) as left:
        program.run_command_line([*NEEDED, *words])
    assert left.value.code == 2
    said = capfd.readouterr().err
    assert said.startswith("nvrx-control: error: ")
    assert said.count("\n") == 1
    assert problem in said


def test_its_flags_are_those_of_the_launcher() -> None:
    """The same names, kinds and defaults; only what help says may differ."""
    launchers = {flag.name: flag for flag in FLAGS}
    for flag in plan.CONTROL_FLAGS:
        assert flag._replace(help="") == launchers[flag.name]._replace(help="")


def test_print_config_shows_its_own_options(capfd: pytest.CaptureFixture[str]) -> None:
    """Only flags that it takes are listed, with their sources; the endpoint need not be known."""
    assert program.run_command_line(["--print-config", "--json", APPLOG]) == 0
    shown = {one["name"]: one for one in json.loads(capfd.readouterr().out)["options"]}
    assert shown["--ft-per-cycle-applog-prefix"]["source"] == "command line"
    assert shown["--ft-enable-log-server"]["value"] is True
    assert "--ft-bad-node-hook" in shown
    assert "--nproc-per-node" not in shown


@pytest.mark.parametrize(
    ("of_control", "of_launcher", "different"),
    [
        ((APPLOG,), (APPLOG, "--ft-enable-log-server=1"), ""),
        ((APPLOG,), (), ""),
        (
            (APPLOG, "--ft-log-server-port=6000"),
            (APPLOG, "--ft-enable-log-server=1"),
            "--ft-log-server-port is 50051 on n1 and 6000 on nvrx-control",
        ),
        (
            (APPLOG,),
            ("--ft-per-cycle-applog-prefix=/elsewhere/j.log", "--ft-enable-log-server=1"),
            "--ft-per-cycle-applog-prefix is /elsewhere/j.log on n1 and /logs/job.log on nvrx-",
        ),
        (("--rdzv-conf=last_call_timeout=1",), (), ""),
        (
            ("--rdzv-conf=last_call_timeout=3",),
            ("--rdzv-conf=last_call_timeout=2",),
            "rdzv_conf last_call_timeout is 2.0 on n1 and 3.0 on nvrx-control",
        ),
        (("--ft-no-restart-exit-code=9",), (), "--ft-no-restart-exit-code is 93 on n1 and 9"),
    ],
)
def test_launchers_that_would_send_logs_elsewhere_are_told(
    tmp_path: Path, of_control: tuple[str, ...], of_launcher: tuple[str, ...], different: str
) -> None:
    """A launcher whose lines would be refused, or go nowhere, does not start."""
    script = tmp_path / "train.py"
    script.write_text("")
    words = ["--nnodes=2:3", "--rdzv-endpoint=control1:1", *of_launcher, str(script)]
    launch = plan_from_args(launcher.parse_args(words), dict(os.environ))
    own = must_agree(launch, rules_of(launch, {}))
    theirs = read_settings(write_settings("nvrx-control", made(*of_control).settings))
    assert different in "; ".join(differences(own, "n1", theirs))
    assert bool(different) == bool(differences(own, "n1", theirs))


# The rules that launchers tell --------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Served]:
    """A store."""
    made = Served()
    yield made
    made.close()


def test_foreign_settings_are_refused(served: Served) -> None:
    """A value that is not the job's ends a control plane, which names the key."""
    served.raw().set(PREFIX + keys.SETTINGS, "garbage")
    with pytest.raises(ForeignValueError, match="settings: the signature is wrong"):
        plane._wait_for_rules(served.connect(), threading.Event())


def test_a_launcher_with_another_token_writes_nothing(served: Served) -> None:
    """It is refused by the host's word, which is there first, whether it needs that or not."""
    served.connect().put(keys.LOG_TOKEN, "none")
    asks_nothing = types.SimpleNamespace(asks_for_log_server=False)
    with pytest.raises(ForeignValueError, match="or a launcher with another token"):
        many_nodes._fetch_log_token(served.connect(b"another"), asks_nothing, 10.0)
    assert not served.connect().has(keys.SETTINGS)


def test_settings_that_are_no_rules_are_no_fault_of_its_command_line(served: Served) -> None:
    """What launchers of another version have written is an error of the job, with code 1."""
    store = served.connect()
    store.put(keys.SETTINGS, write_settings("n1", {"--nnodes": "2:3"}))
    with pytest.raises(NvrxError, match="the launchers' settings are unusable") as raised:
        plane._wait_for_rules(store, threading.Event())
    assert not isinstance(raised.value, ConfigError)


def test_it_ends_with_its_store_though_the_thread_of_that_takes_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is woken by the thread's last call finds the thread alive, and is woken once only."""
    released, real = threading.Event(), program.coordinator_loop.CoordinatorThread.run

    def lingers(thread: program.coordinator_loop.CoordinatorThread) -> None:
        real(thread)
        released.wait(60)

    monkeypatch.setattr(program.coordinator_loop.CoordinatorThread, "_serve", lambda _thread: None)
    monkeypatch.setattr(program.coordinator_loop.CoordinatorThread, "run", lingers)
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(program.endpoint, "claim", lambda *_, **__: listener)
    late = threading.Event()

    def give_up() -> None:
        late.set()
        control._signalled([15])

    with program.ControlPlane(made(), os.environ) as control:
        control._loop.call_at(time.monotonic() + 30, give_up)
        control.run()
        released.set()
    assert not late.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_no_success(number: signal.Signals) -> None:
    """A supervisor that starts a failed program again does so: the job is not over."""
    with ports.claimed() as port:
        words = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
        name = "nvidia_resiliency_ext.fault_tolerance.control_plane"
        command = [sys.executable, "-m", name, *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as served:
            assert served.stderr is not None
            try:
                assert any("serves job 'job'" in line for line in served.stderr)
                served.send_signal(number)
                assert served.wait(60) == 128 + number
            finally:
                served.kill()
