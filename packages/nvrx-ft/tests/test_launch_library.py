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

from nvidia_resiliency_ext.fault_tolerance._launch.command import WorkerCommand
from nvidia_resiliency_ext.fault_tolerance._launch.function_worker import FunctionCall
from nvidia_resiliency_ext.fault_tolerance._launch.library_plan import (
    config_from_plan,
    plan_from_config,
)
from nvidia_resiliency_ext.fault_tolerance._launch.parser import parse_args
from nvidia_resiliency_ext.fault_tolerance._launch.plan import LaunchPlan, plan_from_args
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance.launcher import LaunchConfig, launch_agent

PROGRAM = Path(__file__).parent / "programs" / "library_job.py"
COMMAND = WorkerCommand(argv=("/bin/true",), entry="/bin/true", is_module=False, is_python=False)
ENVIRON = {"OMP_NUM_THREADS": "1"}


def describe(fault_tolerance: FaultToleranceConfig | None = None, **more: Any) -> LaunchConfig:
    fields = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, **more}
    return LaunchConfig(fault_tol_cfg=fault_tolerance, **fields)


def plan(config: LaunchConfig, environ: dict[str, str] = ENVIRON) -> LaunchPlan:
    return plan_from_config(config, COMMAND, environ)


def test_prewarm_is_what_the_configuration_says() -> None:
    """How workers are kept warm follows from the given options, not from a command line's."""
    made = plan(describe(FaultToleranceConfig(prewarm="off", prewarm_import="apex,numpy")))
    assert (made.prewarm.prewarm, made.prewarm.modules) == ("off", ("apex", "numpy"))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (describe(FaultToleranceConfig(attribution_endpoint="localhost")), "attribution_endpoint"),
        (describe(nproc_per_node=0), "nproc_per_node=0: is not from 1 to 65536"),
        (describe(nproc_per_node=10**11), "nproc_per_node=100000000000: is not from"),
        (describe(max_nodes=2), "max_nodes=2: more than one node"),
        (describe(max_restarts=-1), "max_restarts=-1: must not"),
        (describe(term_timeout=-1), "term_timeout=-1: must not"),
        (describe(restart_policy="min-healthy"), "restart_policy='min-healthy'"),
        (describe(rank_monitors={0: object()}), "rank_monitors"),
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
    assert made.signals_to_handle[0] is signal.SIGTERM


def test_a_default_configuration_may_be_debugged() -> None:
    """Without options of its own a job takes the level of the log from the environment."""
    assert plan(describe(), {**ENVIRON, "NVRX_LOG_DEBUG": "1"}).fault_tolerance.log_level == 10
    given = FaultToleranceConfig(log_level=30)
    made = plan(describe(given), {**ENVIRON, "NVRX_LOG_DEBUG": "1"})
    assert made.fault_tolerance.log_level == 30


def test_a_command_line_survives_the_way_through_a_configuration(tmp_path: Path) -> None:
    """What `config_from_args` returns describes the same launch again."""
    script = tmp_path / "train.py"
    script.write_text("")
    words = ("--nproc-per-node=2", "--max-restarts=3", "-t", "3", "--ft-prewarm=off", str(script))
    first = plan_from_args(parse_args(words), ENVIRON)
    again = plan_from_config(config_from_plan(first), first.command, ENVIRON)
    # Settings of the rendezvous that nobody gave are filled in; they only describe.
    assert dataclasses.replace(again, rdzv_configuration=first.rdzv_configuration) == first


def test_an_impossible_configuration_is_an_error_and_no_exit() -> None:
    """`launch_agent` raises ValueError before anything starts; it never ends the program."""
    with pytest.raises(ValueError, match="nproc_per_node=0"):
        launch_agent(describe(nproc_per_node=0), "/bin/true", [])


def test_a_machine_without_a_place_is_one_line(tmp_path: Path) -> None:
    """Where no run directory can be made `ft_launcher` says so in a line, without a traceback."""
    program = (
        "import sys\n"
        "from nvidia_resiliency_ext.shared_utils import rundir\n"
        "rundir._places = lambda environ: []\n"
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
