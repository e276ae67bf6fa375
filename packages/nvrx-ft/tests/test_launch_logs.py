# SPDX-License-Identifier: Apache-2.0
"""The flags of logs: what belongs together, what excludes each other, what a launch makes of it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance import launcher, per_cycle_logs
from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._plan import plan
from nvidia_resiliency_ext.fault_tolerance._plan.log_plan import LogPlan
from nvidia_resiliency_ext.fault_tolerance._torch import elastic
from nvidia_resiliency_ext.fault_tolerance._workers.command import WorkerCommand
from nvidia_resiliency_ext.fault_tolerance.launcher import LogFunnelPorts

APPLOG = "--ft-per-cycle-applog-prefix=/logs/job.log"
NVRX = "--ft-nvrx-logfile=/other/nvrx.log"


@pytest.fixture
def script(tmp_path: Path, clean_environment: pytest.MonkeyPatch) -> str:
    """Return a worker's program; the environment says nothing."""
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def made(*words: str) -> plan.LaunchPlan:
    """Return the plan of a command line."""
    return plan.plan_from_args(launcher.parse_args(list(words)), dict(os.environ))


def test_without_flags_nothing_is_collected(script: str) -> None:
    """Workers write to the launcher's streams unless somebody asks for more."""
    assert made(script).logs == LogPlan()


def test_a_prefix_alone_writes_files_from_here(script: str) -> None:
    """Cycle logs need no server."""
    logs = made(APPLOG, script).logs
    assert (logs.applog_prefix, logs.server, logs.roots) == ("/logs/job.log", None, ("/logs",))


def test_a_launchers_log_turns_the_server_on(script: str) -> None:
    """With the launcher's own log there is a server that may write to both folders."""
    logs = made(APPLOG, NVRX, script).logs
    assert logs.server is not None
    assert logs.roots == ("/logs", "/other")
    assert logs.server.log_prefix == "/other/nvrx"
    assert logs.server.ports.listen_ports() == (50051,)
    assert (logs.server.leaf_queue_chunks, logs.server.grace_s) == (16384, 60.0)


def test_everything_about_the_server_can_be_said(script: str) -> None:
    """Each flag of the log server has its place in the plan."""
    logs = made(
        APPLOG, "--ft-enable-log-server=1", "--ft-log-server-port=6000",
        "--ft-log-aggregator-count=3", "--ft-log-leaf-max-queue-chunks=64",
        "--ft-log-server-log-prefix=/l/srv", "--ft-log-server-graceful-shutdown-timeout=7", script,
    ).logs  # fmt: skip
    assert logs.server is not None
    assert logs.server.ports.listen_ports() == (6000, 6001, 6002, 6003)
    assert (logs.server.leaf_queue_chunks, logs.server.log_prefix) == (64, "/l/srv")
    assert logs.server.grace_s == 7.0


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        ([NVRX], {}, "needs --ft-per-cycle-applog-prefix"),
        ([APPLOG, NVRX], {"NVRX_NODE_LOCAL_TMPDIR": "/x"}, "exclude each other"),
        (["--ft-enable-log-server=1"], {}, "needs --ft-per-cycle-applog-prefix"),
        ([APPLOG, "--ft-log-leaf-max-queue-chunks=63"], {}, "at least 64"),
        ([APPLOG, "--ft-log-leaf-max-queue-chunks=-2"], {}, "at least 64"),
        ([APPLOG, "--ft-log-server-log-prefix=rel/x"], {}, "absolute"),
        (["--ft-per-cycle-applog-prefix=/logs/"], {}, "names a directory"),
        ([APPLOG, NVRX, "--ft-log-server-port=65535", "--ft-log-aggregator-count=2"], {}, "65535"),
        ([APPLOG, "--ft-orphan-workers=keep"], {}, "exclude each other"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str],
    environ: dict[str, str],
    why: str,
    script: str,
    clean_environment: pytest.MonkeyPatch,
) -> None:
    """Flags that contradict each other or lack another one are errors before anything starts."""
    for name, value in environ.items():
        clean_environment.setenv(name, value)
    with pytest.raises(ValueError, match=why):
        made(*words, script)


def test_what_has_no_effect_beside_cycle_logs_is_said(script: str) -> None:
    """Redirects and tee are taken, with one warning that they do nothing."""
    (message,) = made(APPLOG, "--tee=3", "--redirects=3", script).warnings
    assert "--redirects, --tee: no effect" in message


def config(specs: object, **changes: object) -> launcher.LaunchConfig:
    """Return a job that a program describes."""
    return launcher.LaunchConfig(1, 1, 1, FaultToleranceConfig(**changes), logs_specs=specs)  # type: ignore[arg-type]


def planned(described: launcher.LaunchConfig) -> LogPlan:
    """Return the log plan of a described job."""
    command = WorkerCommand(argv=("true",), entry="true", is_module=False, is_python=False)
    return elastic.plan_from_config(described, command, {}).logs


def test_a_program_describes_cycle_logs_by_torchs_class() -> None:
    """A PipeBasedLogsSpecs is as good as the flags."""
    specs = per_cycle_logs.PipeBasedLogsSpecs("/l/job.log", 5, "/l/own.log", "h:5", "me")
    logs = planned(config(specs))
    assert (logs.applog_prefix, logs.launcher_pipe_fd, logs.launcher_log_file) == (
        "/l/job.log",
        5,
        "/l/own.log",
    )
    assert (logs.server_endpoint, logs.node_id) == ("h:5", "me")


def test_other_log_specifications_are_refused() -> None:
    """What is no description of ours, or contradicts the rest, is an error."""
    with pytest.raises(ValueError, match="logs_specs"):
        planned(config(object()))
    specs = per_cycle_logs.PipeBasedLogsSpecs("/l/job.log")
    with pytest.raises(ValueError, match="exclude each other"):
        planned(config(specs, orphan_workers="keep"))


def test_a_command_line_survives_the_way_through_a_configuration(script: str) -> None:
    """config_from_args hands on what the flags say, and a pipe with the launcher's output."""
    args = launcher.parse_args([APPLOG, script])
    described, _, _ = launcher.config_from_args(args, 7, "/logs/own.log")
    logs = planned(described)
    assert (logs.applog_prefix, logs.launcher_pipe_fd, logs.launcher_log_file) == (
        "/logs/job.log",
        7,
        "/logs/own.log",
    )
    with pytest.raises(ValueError, match="together"):
        launcher.config_from_args(args, 7)
    with pytest.raises(ValueError, match="--ft-per-cycle-applog-prefix"):
        launcher.config_from_args(launcher.parse_args([script]), 7, "/logs/own.log")


def test_a_negative_number_of_log_servers_is_refused() -> None:
    """A program that fills in arguments itself is told so; 0 takes as many as the nodes need."""
    args = argparse.Namespace(nnodes="1:2000", ft_log_server_port=6000, ft_log_aggregator_count=0)
    assert LogFunnelPorts.from_launcher_args(args).first_level_count == 2
    args.ft_log_aggregator_count = -1
    with pytest.raises(ValueError, match="first_level_count=-1"):
        LogFunnelPorts.from_launcher_args(args)
