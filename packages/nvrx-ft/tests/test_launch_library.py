# SPDX-License-Identifier: Apache-2.0
"""Jobs that programs describe: what becomes the plan, what is refused, and a whole job."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent.agent import Result
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan, plan_from_args
from nvidia_resiliency_ext.fault_tolerance._torch import elastic
from nvidia_resiliency_ext.fault_tolerance._torch.elastic import plan_from_config
from nvidia_resiliency_ext.fault_tolerance._workers.command import PortReservation, WorkerCommand
from nvidia_resiliency_ext.fault_tolerance._workers.function_worker import FunctionCall
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance.launcher import (
    LaunchConfig,
    NoRestartRequested,
    config_from_args,
    launch_agent,
)

PROGRAM = Path(__file__).parent / "programs" / "library_job.py"
NODE_PROGRAM = PROGRAM.with_name("library_node.py")
COMMAND = WorkerCommand(argv=("/bin/true",), entry="/bin/true", is_module=False, is_python=False)
ENVIRON = {"OMP_NUM_THREADS": "1"}


def describe(fault_tolerance: FaultToleranceConfig | None = None, **more: Any) -> LaunchConfig:
    fields = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, **more}
    return LaunchConfig(fault_tol_cfg=fault_tolerance, **fields)


def nodes(**more: Any) -> LaunchConfig:
    return describe(**{"max_nodes": 2, "rdzv_backend": "c10d", "rdzv_endpoint": "host:1", **more})


def plan(config: LaunchConfig, environ: dict[str, str] = ENVIRON) -> LaunchPlan:
    return plan_from_config(config, COMMAND, environ)


def test_prewarm_is_what_the_configuration_says() -> None:
    """How workers are kept warm follows from the given options, not from a command line's."""
    made = plan(describe(FaultToleranceConfig(prewarm="off", prewarm_import="apex,numpy")))
    assert (made.fault_tol_cfg.prewarm, made.fault_tol_cfg.prewarm_import) == ("off", "apex,numpy")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            describe(FaultToleranceConfig(attribution_endpoint="localhost")),
            "needs --ft-per-cycle-applog-prefix",
        ),
        (describe(event_log_handler="nobody"), "--event-log-handler nobody: torch knows no"),
        (describe(nproc_per_node=0), "nproc_per_node: 0 is not an integer"),
        (describe(nproc_per_node=10**11), "nproc_per_node: 100000000000 is not an"),
        (describe(max_nodes=0), "max_nodes=0: 1 <= min_nodes <= max_nodes"),
        (describe(max_nodes=2, rdzv_backend="c10d"), "rdzv_endpoint: say where"),
        (describe(max_nodes=2, rdzv_endpoint="a:1"), "rdzv_backend: 'etcd' is not one of c10d"),
        (nodes(rdzv_configs={"rdzv_impl": "other"}), "rdzv_impl: 'other' is not one of"),
        (nodes(rdzv_configs={"use_infra_group_rank": "perhaps"}), "use_infra_group_rank"),
        (describe(max_restarts=-1), "max_restarts: -1 is not"),
        (describe(term_timeout=-1), "term_timeout: -1 is not"),
        (describe(restart_policy="sometimes"), "restart_policy: 'sometimes' is not"),
        (describe(rank_monitors={0: object()}), "rank_monitors"),
        (describe(shutdown_timeout=-1), "shutdown_timeout: -1 is not"),
        (describe(master_port=70000), "master_port: 70000 is not"),
        (describe(no_restart_exit_code=0), "no_restart_exit_code: 0 is not"),
        (describe(signals_to_handle="SIGNO"), "signals_to_handle: 'SIGNO' is not a comma"),
        (describe(cycle_info_job_id="a/b"), "--ft-cycle-info-job-id"),
        (describe(logs_specs=object()), "logs_specs"),
        (describe(FaultToleranceConfig(bad_node_hook="/no/such")), "--ft-bad-node-hook"),
    ],
)
def test_what_cannot_be_had_is_refused(config: LaunchConfig, problem: str) -> None:
    """A library call refuses what the command line refuses, as a ValueError that names it."""
    with pytest.raises(ValueError, match=problem):
        plan(config)


def test_variables_of_the_command_line_have_no_part_in_it(
    clean_environment: pytest.MonkeyPatch,
) -> None:
    """`PET_` variables stand in for flags; a program that gives no flags is not touched by them."""
    for name, value in {"NNODES": "2", "FT_CFG_PATH": "/no/file", "MASTER_PORT": "2001"}.items():
        clean_environment.setenv(f"PET_{name}", value)
    made = plan(describe(), {**ENVIRON, "PET_NNODES": "2", "PET_MASTER_PORT": "2001"})
    assert (made.max_nodes, made.master_port) == (1, None)
    assert made.signals[0] is signal.SIGTERM


def test_a_default_configuration_may_be_debugged() -> None:
    """Without options of its own a job takes the level of the log from the environment."""
    assert plan(describe(), {**ENVIRON, "NVRX_LOG_DEBUG": "1"}).fault_tol_cfg.log_level == 10
    given = FaultToleranceConfig(log_level=30)
    made = plan(describe(given), {**ENVIRON, "NVRX_LOG_DEBUG": "1"})
    assert made.fault_tol_cfg.log_level == 30


def test_a_command_line_survives_the_way_through_a_configuration(tmp_path: Path) -> None:
    """What `config_from_args` returns describes the same launch again."""
    script = tmp_path / "train.py"
    script.write_text("")
    words = (
        "--nproc-per-node=2", "--max-restarts=3", "-t", "3", "--ft-prewarm=off",
        "--event-log-handler=console", "--virtual-local-rank", "--duplicate-stdout-filters=a,b",
        str(script),
    )  # fmt: skip
    first = plan_from_args(parse_args(words), ENVIRON)
    again = plan_from_config(first, first.command, ENVIRON)
    # Settings of the rendezvous that nobody gave are filled in; they only describe.
    assert dataclasses.replace(again, rdzv_configs=first.rdzv_configs) == first


def test_no_flag_gets_lost_on_the_way_through_a_configuration(tmp_path: Path) -> None:
    """What torch's `LaunchConfig` has no field for is launched as the command line says, too."""
    words = (
        "--nnodes=2", "--rdzv-endpoint=h:1", "--node-rank=3", "--master-addr=10.9.8.7",
        "--master-port=23456", "--signals-to-handle=SIGTERM,SIGUSR1", "--shutdown-timeout=4",
        f"--ft-node-health-check-endpoint=unix://{tmp_path}/health", "--ft-cycle-info-job-id=j7",
        "--ft-no-restart-exit-code=77", "--local-addr=10.9.8.6", "--no-python", "/bin/true",
    )  # fmt: skip
    first = plan_from_args(parse_args(words), ENVIRON)
    again = plan_from_config(first, first.command, ENVIRON)
    assert dataclasses.replace(again, rdzv_configs=first.rdzv_configs) == first
    assert (again.master_port, again.node_rank, again.no_restart_exit_code) == (23456, 3, 77)


def test_torchs_own_fields_mean_what_they_mean_there() -> None:
    """The static backend's rank orders nodes, its port is that of the rendezvous, and so on."""
    static = {"rdzv_backend": "static", "rdzv_configs": {"rank": 1}, "master_port": 1}
    made = plan(nodes(**static, shutdown_timeout=7))
    assert (made.node_rank, made.master_port, made.workers_stop_timeout) == (1, None, 7)
    assert plan(nodes(**static, node_rank=0)).node_rank == 0


def test_a_command_line_is_described_before_its_script_exists(
    clean_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`config_from_args` only describes: the script may be on another machine; a launch looks."""
    clean_environment.setenv("PYTHON_EXEC", str(tmp_path / "python"))
    args = parse_args(["--max-restarts=2", str(tmp_path / "train.py"), "--x"])
    config, command, rest = config_from_args(args)
    assert config.max_restarts == 2
    assert (command, rest) == (str(tmp_path / "python"), ["-u", str(tmp_path / "train.py"), "--x"])
    with pytest.raises(ValueError, match=r"python' does not exist.*train.py' does not exist"):
        plan_from_args(args, os.environ)


def test_callers_learn_why_there_is_no_restart(tmp_path: Path) -> None:
    """The exception has the reason of the rendezvous, whatever the exit code is."""
    reports = tmp_path / "iteration"
    reports.write_text("7")
    config = describe(
        FaultToleranceConfig(
            checkpoint_iteration_file=str(reports), max_no_progress_cycles=1, restart_backoff=0
        ),
        max_restarts=3,
        nproc_per_node=1,
    )
    with pytest.raises(NoRestartRequested, match="no restart: rank 0") as caught:
        launch_agent(config, "/bin/false", [])
    assert caught.value.reason == "no_progress"
    stopped = Result(93, "no restart: useless", [], no_restart="attribution_stop")
    with pytest.raises(NoRestartRequested, match="useless") as caught:
        elastic._raise(plan(config), stopped)
    assert caught.value.reason == "attribution_stop"


def test_a_command_line_of_many_nodes_survives_too(tmp_path: Path) -> None:
    """What a `LaunchConfig` has no field for travels in the settings of the rendezvous."""
    script = tmp_path / "train.py"
    script.write_text("")
    words = (
        "--nnodes=2:3", "--rdzv-endpoint=host:1", "--rdzv-conf=is_host=0,join_timeout=7",
        "--ft-rdzv-impl=legacy", "--ft-use-infra-group-rank=false", str(script),
    )  # fmt: skip
    first = plan_from_args(parse_args(words), ENVIRON)
    again = plan_from_config(first, first.command, ENVIRON)
    same = {"rdzv_configs": first.rdzv_configs, "warnings": first.warnings}
    assert dataclasses.replace(again, **same) == first
    assert again.rdzv_configs.items() >= first.rdzv_configs.items()


@pytest.mark.parametrize(
    ("more", "last_call"),
    [
        ({}, 1),
        ({"restart_policy": "min-healthy"}, 30),
        ({"rdzv_configs": {"rdzv_impl": "legacy"}}, 30),
        ({"rdzv_configs": {"rdzv_impl": "legacy", "last_call_timeout": 5}}, 5),
    ],
)
def test_where_all_nodes_work_more_of_them_are_waited_for(
    more: dict[str, Any], last_call: int
) -> None:
    """The last call is 30 s where every node that comes works, 1 s elsewhere, or as given."""
    assert nodes(**more).rdzv_configs["last_call_timeout"] == last_call


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_functions_run_on_many_nodes(tmp_path: Path) -> None:
    """Two of three nodes run a function, over a restart; each returns its rank's value only."""
    reserved = PortReservation()
    environ = {**os.environ, "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1", "TMPDIR": str(tmp_path)}
    words = [sys.executable, str(NODE_PROGRAM), f"127.0.0.1:{reserved.port}", "2", "3"]
    started = [
        subprocess.Popen(
            [*words, str(tmp_path)],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    try:
        done = [process.communicate(timeout=200) for process in started]
    finally:
        reserved.release()
        for process in started:
            process.kill()
            process.wait()
    said = "\n".join(err for _, err in done)
    assert [process.returncode for process in started] == [0, 0, 0], said
    results = [json.loads(out.partition("RESULT ")[2]) for out, _ in done]
    assert sorted(results, key=str) == [{"0": "0 of 2 in 1"}, {"1": "1 of 2 in 1"}, {}]
    assert {path.name for path in tmp_path.glob("rank*")} == {"rank0", "rank1"}


def test_an_impossible_configuration_is_an_error_and_no_exit() -> None:
    """`launch_agent` raises ValueError before anything starts; it never ends the program."""
    with pytest.raises(ValueError, match="nproc_per_node: 0"):
        launch_agent(describe(nproc_per_node=0), "/bin/true", [])


def test_a_machine_without_a_place_is_one_line(tmp_path: Path) -> None:
    """Where no run directory can be made `ft_launcher` says so in a line, without a traceback."""
    program = (
        "import sys\n"
        "from nvidia_resiliency_ext.shared_utils import rundir\n"
        "rundir.trusted_parents = lambda environ: []\n"
        "from nvidia_resiliency_ext.fault_tolerance.launcher import main\n"
        "main(['/bin/true'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **ENVIRON}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("ft_launcher: error: the launch cannot be prepared: ")
    assert done.stderr.count("\n") == 1
    assert "no place for a run directory" in done.stderr


def test_a_standby_that_cannot_be_started_is_the_reason_told(tmp_path: Path) -> None:
    """Where the kernel refuses what standbys need the job runs cold, and the log says why."""
    (tmp_path / "train.py").write_text("try:\n    import trl\nexcept ImportError:\n    pass\n")
    program = (
        "import os\n"
        "def refuse(*_): raise OSError(38, 'Function not implemented')\n"
        "os.memfd_create = refuse\n"
        "from nvidia_resiliency_ext.fault_tolerance.launcher import main\n"
        "main(['--redirects=3', '--log-dir=logs', 'train.py'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **ENVIRON}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cold start: its standby failed" in done.stderr


def test_a_value_that_cannot_be_sent_is_the_workers_error(tmp_path: Path) -> None:
    """A function that returns what cannot be pickled fails with its error file, like any other."""
    call = FunctionCall(str(tmp_path), threading.Lock, [])
    error_file = tmp_path / "error.json"
    done = subprocess.run(
        call.argv,
        env={**os.environ, "RANK": "0", "TORCHELASTIC_ERROR_FILE": str(error_file)},
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "cannot pickle" in json.loads(error_file.read_text())["message"]["message"]


def test_functions_return_their_values_and_none_where_they_leave(tmp_path: Path) -> None:
    """A rank that leaves with 0 returned None; warnings of the plan are logged once."""
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environ |= {"PET_NNODES": "2", "PET_FT_CFG_PATH": "/no/file", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.partition("RESULT ")[2])
    assert result == {"0": "hello of 3", "1": None, "2": None}
    assert done.stdout.count("OMP_NUM_THREADS is not set") == 1
