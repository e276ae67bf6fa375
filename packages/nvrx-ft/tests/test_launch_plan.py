# SPDX-License-Identifier: Apache-2.0
"""From flags, file and environment to a plan: what it holds, and what is refused before a start."""

import argparse
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._config.syntax import Std
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan, plan_from_args
from nvidia_resiliency_ext.fault_tolerance._workers.conditions import import_list
from nvidia_resiliency_ext.fault_tolerance._workers.output import Stream
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig

ENVIRON = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _clean(clean_environment: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PET_"):
            clean_environment.delenv(name)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


def plan(*words: str, environ: Mapping[str, str] = ENVIRON) -> LaunchPlan:
    return plan_from_args(parse_args(words), environ)


def test_the_default_plan(script: str) -> None:
    """Without flags: one worker, no restarts, python -u, fresh ports, defaults of the config."""
    made = plan(script, "--x", "1")
    assert made.command.argv == (sys.executable, "-u", script, "--x", "1")
    assert made.command.is_python
    assert not made.command.is_module
    assert (made.nproc_per_node, made.min_nodes, made.max_nodes) == (1, 1, 1)
    assert (made.max_restarts, made.restart_policy, made.role) == (0, "any-failed", "default")
    assert (made.term_timeout, made.workers_stop_timeout) == (1800.0, 15.0)
    assert (made.master_addr, made.master_port, made.local_addr) == ("127.0.0.1", None, None)
    assert made.rdzv_endpoint == "127.0.0.1:29500"
    assert len(made.run_id) == 32
    assert made.output.redirects == made.output.tee == {0: Std.NONE}
    assert made.output.console_ranks is None
    assert made.signals[0] is signal.SIGTERM
    assert made.no_restart_exit_code == 93
    assert made.monitors_enabled
    assert made.fault_tol_cfg.prewarm == "auto"
    assert "torch" in import_list(made.fault_tol_cfg.prewarm_import)
    assert made.fault_tol_cfg == FaultToleranceConfig()
    assert made.warnings == ()


def test_flags_reach_the_plan(script: str) -> None:
    """Each flag of torchrun that this version has shows in the plan."""
    made = plan(
        *("--nproc_per_node=4", "--max-restarts=2", "--role=r", "--rdzv-id=job7"),
        *("--rdzv-endpoint=h:1", "--rdzv-conf=timeout=5,join_timeout=6", "--log-dir=/logs"),
        *("-r", "3", "-t", "0:1,2:3,9:1", "--local-ranks-filter=0,2", "--term-timeout=5"),
        *("--workers-stop-timeout=6", "--monitor-interval=2", "--start-method=fork"),
        *("--master-addr=[::1]", "--master-port=2000", "--local-addr=10.0.0.1"),
        *("--signals-to-handle=sigusr1,SIGTERM", "--ft-no-restart-exit-code=7"),
        *("--ft-prewarm=off", "--ft-prewarm-import=apex", script),
        environ=ENVIRON | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"},
    )
    assert (made.nproc_per_node, made.max_restarts, made.role) == (4, 2, "r")
    assert (made.run_id, made.rdzv_endpoint, made.log_dir) == ("job7", "h:1", "/logs")
    assert made.rdzv_configs == {"timeout": "5", "join_timeout": "6"}
    assert made.output.redirects == dict.fromkeys(range(4), Std.ALL)
    assert made.output.tee == {0: Std.OUT, 1: Std.NONE, 2: Std.ALL, 3: Std.NONE}
    assert made.output.console_ranks == frozenset({0, 2})
    assert (made.term_timeout, made.workers_stop_timeout) == (5.0, 6.0)
    assert (made.monitor_interval, made.start_method) == (2.0, "fork")
    assert (made.master_addr, made.master_port, made.local_addr) == ("::1", 2000, "10.0.0.1")
    assert made.signals == (signal.SIGUSR1, signal.SIGTERM)
    assert made.no_restart_exit_code == 7
    assert (made.fault_tol_cfg.prewarm, made.fault_tol_cfg.prewarm_import) == ("off", "apex")
    assert made.log_line_prefix_template == "[${rank}]"


def test_standalone_has_an_id_of_its_own(script: str) -> None:
    """Two standalone launches never share an id, and take a free endpoint."""
    first, second = plan("--standalone", script), plan("--standalone", script)
    assert first.run_id != second.run_id
    assert len(first.run_id) == 32
    assert first.rdzv_endpoint == "localhost:0"


def test_the_newer_name_of_the_stop_timeout_is_taken(script: str) -> None:
    """`--shutdown-timeout` sets it, and our own name wins when both are given."""
    assert plan("--shutdown-timeout=3", script).workers_stop_timeout == 3.0
    both = plan("--shutdown-timeout=3", "--workers-stop-timeout=4", script)
    assert both.workers_stop_timeout == 4.0


def test_torchs_variable_stands_in_for_the_flags(script: str) -> None:
    """TORCH_ELASTIC_SHUTDOWN_TIMEOUT counts where no flag says how long workers have to end."""
    environ = ENVIRON | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    assert plan(script, environ=environ).workers_stop_timeout == 5.0
    assert plan("--shutdown-timeout=3", script, environ=environ).workers_stop_timeout == 3.0
    assert plan("--workers-stop-timeout=4", script, environ=environ).workers_stop_timeout == 4.0
    for wrong in ("-1", "soon"):
        with pytest.raises(ValueError, match=f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT.*{wrong}"):
            plan(script, environ=ENVIRON | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": wrong})


def test_a_job_that_nobody_named_has_an_id_of_its_own(script: str) -> None:
    """One node that meets nobody gets a random id, as under torchrun; others share a known one."""
    assert plan(script).run_id != plan(script).run_id
    assert plan("--rdzv-id=none", script).run_id == "none"
    for meets in ("--rdzv-endpoint=h:1", "--master-port=2000", "--nnodes=1:2"):
        assert plan(meets, script).run_id == "none"


def test_a_port_is_fixed_only_if_somebody_gave_it(
    script: str, clean_environment: pytest.MonkeyPatch
) -> None:
    """The default, and 0, mean a fresh port per cycle; a flag or variable fixes it."""
    assert plan("--master-port=0", script).master_port is None
    assert plan("--master-port=29500", script).master_port == 29500
    clean_environment.setenv("PET_MASTER_PORT", "2001")
    assert plan(script).master_port == 2001


def test_the_port_of_the_rendezvous_is_not_that_of_rank_0(script: str) -> None:
    """Many nodes meet at the endpoint's port, so ranks get fresh ones; another port stays fixed."""
    static = ("--nnodes=2", "--node_rank=1", "--master_addr=a", "--master_port=2001")
    for words in (static, (*static, "--rdzv-backend=static"), (*static, "--rdzv-endpoint=b:2001")):
        assert plan(*words, script).master_port is None, words
    assert plan(*static, script).rdzv_endpoint == "a:2001"
    assert (
        plan("--nnodes=2", "--rdzv-endpoint=b", "--master-port=29400", script).master_port is None
    )
    assert plan(*static, "--rdzv-endpoint=b:2002", script).master_port == 2001
    assert plan("--master_addr=a", "--master_port=2001", script).master_port == 2001


def test_a_file_gives_options_and_flags_win(script: str, tmp_path: Path) -> None:
    """The file's options are in the plan, except those that a flag gave."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "trainer: {fault_tolerance: {prewarm: off, safety_factor: 2, max_no_progress_restarts: 1}}"
    )
    made = plan(f"--ft-cfg-path={path}", "--ft-safety-factor=3", script)
    assert made.fault_tol_cfg == FaultToleranceConfig(
        prewarm="off", safety_factor=3.0, max_no_progress_cycles=1
    )
    assert made.fault_tol_cfg.prewarm == "off"
    assert len(made.warnings) == 1


def test_a_missing_file_may_be_allowed(script: str, tmp_path: Path) -> None:
    """With --ft-ignore-missing-cfg a missing file or section leaves a warning and the defaults."""
    empty = tmp_path / "empty.yaml"
    empty.write_text("a: 1\n")
    for path in (empty, tmp_path / "none.yaml"):
        made = plan(f"--ft-cfg-path={path}", "--ft-ignore-missing-cfg", script)
        assert made.fault_tol_cfg == FaultToleranceConfig()
        assert len(made.warnings) == 1


def test_unknown_keys_may_be_allowed(script: str, tmp_path: Path) -> None:
    """With --ft-ignore-unknown-cfg unknown keys leave one warning."""
    path = tmp_path / "job.yaml"
    path.write_text("fault_tolerance: {aa: 1, bb: 2, safety_factor: 2}\n")
    with pytest.raises(ValueError, match=r"unknown key 'aa'.*unknown key 'bb'"):
        plan(f"--ft-cfg-path={path}", script)
    made = plan(f"--ft-cfg-path={path}", "--ft-ignore-unknown-cfg", script)
    assert made.fault_tol_cfg.safety_factor == 2.0
    assert len(made.warnings) == 1


def test_all_that_is_refused_is_said_at_once(script: str) -> None:
    """Several things asked for that cannot be had are in one message."""
    with pytest.raises(ValueError, match=r"--ft-nvrx-logfile.*event-log-handler nobody") as refused:
        plan("--event-log-handler=nobody", "--ft-nvrx-logfile=/a", "--max-restarts=1", script)
    assert "it has console, dynamic_rendezvous, null" in str(refused.value)


def test_a_file_with_every_default_starts_a_job(script: str, tmp_path: Path) -> None:
    """What `to_yaml_file` writes can be read back."""
    path = tmp_path / "job.yaml"
    FaultToleranceConfig(enable_nic_healthcheck=False).to_yaml_file(path)
    made = plan(f"--ft-cfg-path={path}", script)
    assert made.fault_tol_cfg.enable_nic_healthcheck is False


def test_every_worker_sees_one_device_as_its_first(script: str) -> None:
    """`--virtual-local-rank`: the rank's entry of CUDA_VISIBLE_DEVICES, else the rank itself."""
    words = ("--virtual-local-rank", "--nproc-per-node=2", script)
    assert plan(*words).virtual_devices == ("0", "1")
    seen = {"CUDA_VISIBLE_DEVICES": "5, GPU-7,2"}
    assert plan(*words, environ=ENVIRON | seen).virtual_devices == ("5", "GPU-7")
    assert plan(script).virtual_devices is None
    with pytest.raises(ValueError, match=r"2 workers need a device each, and CUDA_V.*=3 names 1"):
        plan(*words, environ=ENVIRON | {"CUDA_VISIBLE_DEVICES": "3"})


def test_filters_without_files_are_said_to_do_nothing(script: str) -> None:
    """Only what goes to files is looked at; cycle logs take everything."""
    words = ("--duplicate-stdout-filters=a,,b,c", "--duplicate-stderr-filters=d", script)
    made = plan(*words)
    assert made.output.filters == {Stream.STDOUT: ("a,b", "c"), Stream.STDERR: ("d",)}
    (sent,) = made.warnings
    assert sent.startswith("--duplicate-stdout-filters, --duplicate-stderr-filters: no effect")
    assert plan("--tee=1", *words).warnings == ()
    (sent,) = plan("--tee=1", "--ft-per-cycle-applog-prefix=/l/a", *words).warnings
    assert sent.startswith("--tee, --duplicate-stdout-filters, --duplicate-stderr-filters: no")


def test_a_restart_policy_in_a_file_is_taken(script: str, tmp_path: Path) -> None:
    """The file's policy holds unless a flag names another."""
    path = tmp_path / "job.yaml"
    path.write_text("fault_tolerance: {restart_policy: any-failed}\n")
    assert plan(f"--ft-cfg-path={path}", script).restart_policy == "any-failed"
    path.write_text("fault_tolerance: {restart_policy: min-healthy}\n")
    assert plan(f"--ft-cfg-path={path}", script).restart_policy == "min-healthy"
    made = plan(f"--ft-cfg-path={path}", "--ft-restart-policy=any-failed", script)
    assert made.restart_policy == "any-failed"


def test_whether_the_scheduler_orders_the_nodes(script: str, tmp_path: Path) -> None:
    """The flag says so, else the key of earlier releases, else it does."""
    path = tmp_path / "job.yaml"
    path.write_text("fault_tolerance: {use_infra_group_rank: false}\n")
    assert plan(script).use_infra_group_rank
    assert not plan(f"--ft-cfg-path={path}", script).use_infra_group_rank
    assert plan(f"--ft-cfg-path={path}", "--ft-use-infra-group-rank=1", script).use_infra_group_rank
    assert not plan("--ft-use-infra-group-rank=0", script).use_infra_group_rank


def test_the_older_address_of_attribution_needs_both_parts(script: str) -> None:
    """Host and port of an earlier release make one address."""
    with pytest.raises(ValueError, match="needs both a host and a port"):
        plan("--ft-attrsvc-host=h", script)


@pytest.fixture
def numactl(tmp_path: Path) -> str:
    """Give the path of a program that stands in for numactl; it is alone in its folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "numactl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


def numa(numactl: str, gpus: str = "2") -> dict[str, str]:
    return {**ENVIRON, "PATH": os.path.dirname(numactl), "NVRX_GPUS_PER_NUMA": gpus}


def test_workers_are_bound_to_the_numa_node_of_their_gpu(script: str, numactl: str) -> None:
    """Each worker runs under numactl, which names the node of its local rank for CPU and memory."""
    made = plan("--nproc-per-node=4", script, environ=numa(numactl))
    node = "--cpunodebind", "1", "--membind", "1"
    assert made.command.for_local_rank(3) == (numactl, *node, sys.executable, "-u", script)
    assert made.command.for_local_rank(0)[1:5] == ("--cpunodebind", "0", "--membind", "0")


def test_memory_may_come_from_elsewhere(script: str, numactl: str) -> None:
    """Without strictness memory is only preferred where the worker runs."""
    made = plan("--nproc-per-node=2", "--ft-numa-bind-strict=0", script, environ=numa(numactl))
    assert made.command.for_local_rank(1)[1:4] == ("--cpunodebind", "0", "--localalloc")


def test_a_macro_is_replaced_behind_numactl_only(script: str, numactl: str) -> None:
    """What torchrun substitutes in a command is substituted in a bound one too."""
    made = plan("--nproc-per-node=2", script, "${local_rank}", environ=numa(numactl))
    assert made.command.for_local_rank(1)[-1] == "1"


def test_binding_without_numactl_is_said_at_the_start(script: str, tmp_path: Path) -> None:
    """A missing numactl, or a number that is none, ends the launch before anything starts."""
    environ = {**ENVIRON, "PATH": str(tmp_path), "NVRX_GPUS_PER_NUMA": "4"}
    with pytest.raises(ValueError, match="needs the program 'numactl', which is not on PATH"):
        plan(script, environ=environ)
    for wrong in ("0", "-1", "two", "1.5"):
        with pytest.raises(ValueError, match="is not a number of GPUs >= 1"):
            plan(script, environ=environ | {"NVRX_GPUS_PER_NUMA": wrong})


def test_a_hook_that_cannot_run_is_said_at_the_start(script: str) -> None:
    """The command that is told of bad nodes must exist, and be a command."""
    assert plan("--ft-bad-node-hook=sh -c 'exit 0'", script).fault_tol_cfg.bad_node_hook
    with pytest.raises(ValueError, match="--ft-bad-node-hook: program '/no/such' does not exist"):
        plan("--ft-bad-node-hook=/no/such thing", script)
    with pytest.raises(SystemExit):
        plan("--ft-bad-node-hook=sh 'open", script)


def test_monitors_can_be_switched_off(script: str) -> None:
    """Any text in the variable switches the monitors off, and the log says so."""
    made = plan(script, environ=ENVIRON | {"NVRX_DISABLE_RANK_MONITORS": "0"})
    assert not made.monitors_enabled
    assert "NVRX_DISABLE_RANK_MONITORS is set: hangs are not found" in " ".join(made.warnings)


def test_scripts_that_cannot_run_are_named(tmp_path: Path, script: str) -> None:
    """A missing, unreadable or wrong script is found before any worker starts."""
    cases = {
        str(tmp_path / "none.py"): "does not exist; name a file, or a module with -m",
        str(tmp_path): "is a directory without __main__.py",
    }
    if os.geteuid() != 0:
        Path(script).chmod(0)
        cases[script] = "cannot be read"
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            plan(path)
    (tmp_path / "__main__.py").write_text("")
    assert plan(str(tmp_path)).command.entry == str(tmp_path)


def test_programs_that_cannot_run_are_named(tmp_path: Path, script: str) -> None:
    """With --no-python the program must be executable, or found on PATH."""
    with pytest.raises(ValueError, match="is not executable"):
        plan("--no-python", script)
    with pytest.raises(ValueError, match="'no-such-program' does not exist or is not on PATH"):
        plan("--no-python", "no-such-program")
    Path(script).chmod(stat.S_IRWXU)
    assert plan("--no-python", script, "a").command.argv == (script, "a")
    environ = ENVIRON | {"PATH": str(tmp_path)}
    assert plan("--no-python", "train.py", environ=environ).command.argv == ("train.py",)


def test_python_may_be_chosen(script: str) -> None:
    """PYTHON_EXEC replaces the interpreter, and must exist."""
    made = plan(script, environ=ENVIRON | {"PYTHON_EXEC": "sh"})
    assert made.command.argv[0] == "sh"
    with pytest.raises(ValueError, match="PYTHON_EXEC: program '/no/python' does not exist"):
        plan(script, environ=ENVIRON | {"PYTHON_EXEC": "/no/python"})


def test_modules_are_run_as_modules() -> None:
    """`-m` names a module; it excludes the other ways."""
    made = plan("-m", "json.tool", "x")
    assert made.command.argv == (sys.executable, "-u", "-m", "json.tool", "x")
    assert made.command.is_module
    for other in ("--no-python", "--run-path"):
        with pytest.raises(ValueError, match=f"--module and {other} exclude each other"):
            plan("-m", other, "sh")


@pytest.mark.parametrize(
    ("environ", "nproc", "expected"),
    [
        ({}, 1, None),
        ({}, 2, "1"),
        ({"OMP_NUM_THREADS": "8"}, 2, None),
        ({"OMP_NUM_THREADS": ""}, 2, None),
    ],
)
def test_threads_of_workers(
    script: str, environ: dict[str, str], nproc: int, expected: str | None
) -> None:
    """Several workers get one thread each, with a warning, unless somebody decided otherwise."""
    made = plan(f"--nproc-per-node={nproc}", script, environ={"PATH": "/bin"} | environ)
    assert made.omp_num_threads == expected
    assert len(made.warnings) == (expected is not None)


@pytest.mark.parametrize(
    ("tasks", "is_right"),
    [
        ("1", True),
        ("1(x4)", True),
        ("1(x4),1", True),
        ("2", False),
        ("1(x4),2", False),
        ("8(x2)", False),
        ("11", False),
        ("1(y4)", False),
        ("", True),
    ],
)
def test_slurm_must_start_one_launcher_per_node(script: str, tasks: str, is_right: bool) -> None:
    """Several tasks on a node are refused with the fix, unless they are meant."""
    environ = ENVIRON | {"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": tasks}
    meant = environ | {"NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "true"}
    outside = {name: value for name, value in environ.items() if name != "SLURM_JOB_ID"}
    plan(script, environ=meant)
    plan(script, environ=outside)
    if is_right:
        plan(script, environ=environ)
    else:
        with pytest.raises(ValueError, match=r"srun --ntasks=\$SLURM_NNODES --ntasks-per-node=1 "):
            plan(script, environ=environ)


def test_an_unclear_variable_is_named(script: str) -> None:
    """A truth value that is none is reported, not guessed."""
    environ = ENVIRON | {
        "SLURM_JOB_ID": "1",
        "SLURM_TASKS_PER_NODE": "2",
        "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "perhaps",
    }
    with pytest.raises(ValueError, match="NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE: 'perhaps' is not"):
        plan(script, environ=environ)


def test_the_old_log_level_variable_is_deprecated(script: str) -> None:
    """FT_LAUNCHER_LOGLEVEL leaves a DeprecationWarning that names what to use."""
    with pytest.warns(DeprecationWarning, match="FT_LAUNCHER_LOGLEVEL is deprecated; use"):
        plan(script, environ=ENVIRON | {"FT_LAUNCHER_LOGLEVEL": "DEBUG"})


def test_a_missing_file_is_one_problem_with_its_remedy(script: str) -> None:
    """A file that does not exist is named with the flag and what to do."""
    with pytest.raises(ValueError, match="--ft-cfg-path: file '/no/cfg' does not exist; correct"):
        plan("--ft-cfg-path=/no/cfg", script)


def test_a_plan_needs_no_record_of_who_gave_what(script: str) -> None:
    """The result of another parser with the same attributes makes the same plan."""
    args = argparse.Namespace(**vars(parse_args(["--rdzv-id=job7", script])))
    del args.given, args.warnings
    assert plan_from_args(args, ENVIRON) == plan("--rdzv-id=job7", script)
    args.master_port = 2000
    assert plan_from_args(args, ENVIRON).master_port == 2000
    args.ft_attribution_node_action = "exclude"
    made = plan_from_args(args, ENVIRON)
    assert made.fault_tol_cfg.attribution_node_action == "exclude"


def test_planning_imports_neither_torch_nor_yaml(script: str) -> None:
    """Without a file, planning a launch loads no large module."""
    program = """
import os, sys
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.fault_tolerance._plan.plan import plan_from_args
plan_from_args(parse_args(sys.argv[1:]), os.environ)
print(*{"torch", "numpy", "psutil", "yaml", "grpc", "asyncio", "importlib.metadata"}
      & set(sys.modules))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, script],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert result.stdout.split() == []


def test_debug_logging_is_a_variable_unless_an_option_says_more(script: str) -> None:
    """NVRX_LOG_DEBUG means what it means to the logger; a given level wins over it."""
    for text, level in (("1", 10), ("Yes", 10), ("0", 20), ("", 20)):
        made = plan(script, environ=ENVIRON | {"NVRX_LOG_DEBUG": text})
        assert made.fault_tol_cfg.log_level == level
    environ = ENVIRON | {"NVRX_LOG_DEBUG": "1"}
    made = plan("--ft-log-level=WARNING", script, environ=environ)
    assert made.fault_tol_cfg.log_level == 30


def test_host_and_port_may_come_from_two_places(script: str, tmp_path: Path) -> None:
    """Half of the older address in a file and half in a flag are one address."""
    path = tmp_path / "job.yaml"
    path.write_text("fault_tolerance: {attrsvc_host: h}\n")
    words = (f"--ft-cfg-path={path}", "--ft-per-cycle-applog-prefix=/logs/job.log")
    made = plan(*words, "--ft-attrsvc-port=80", script)
    assert made.attribution.endpoint == "http://h:80"
