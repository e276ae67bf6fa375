# SPDX-License-Identifier: Apache-2.0
"""`--logs-specs` and `logs_specs`: torch's own specification, and one of a user's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing import Std as TorchStd

from nvidia_resiliency_ext.fault_tolerance._config.syntax import Std
from nvidia_resiliency_ext.fault_tolerance._plan.plan import LaunchPlan, plan_from_args
from nvidia_resiliency_ext.fault_tolerance._torch.elastic import launch_agent
from nvidia_resiliency_ext.fault_tolerance._workers.log_specs import (
    OutputSpecs,
    load_specs,
)
from nvidia_resiliency_ext.fault_tolerance._workers.output import Filter, Stream, Target
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.fault_tolerance.launcher import LaunchConfig
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

ENVIRON = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
MODULE = """
class Mine:
    def __init__(self, log_dir=None, redirects=None, tee=None, local_ranks_filter=None):
        self.given = (log_dir, redirects, tee, local_ranks_filter)

    def reify(self, envs):
        raise RuntimeError("no room")

def broken(**_):
    raise OSError("no such disk")

def nothing(**_):
    return 7
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with entry points."""
    (tmp_path / "my_log_specs.py").write_text(MODULE)
    info = tmp_path / "my_log_specs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-log-specs\nVersion: 1.0\n")
    names = ("mine = my_log_specs:Mine", "broken = my_log_specs:broken")
    (info / "entry_points.txt").write_text(
        "\n".join(("[torchrun.logs_specs]", *names, "nothing = my_log_specs:nothing"))
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def plan(*words: str) -> LaunchPlan:
    """Return the plan of a command line."""
    return plan_from_args(parse_args([*words, __file__]), ENVIRON)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_made_as_torchrun_makes_it() -> None:
    """It gets torch's own values: one for all ranks, or one for each."""
    made = plan("--logs-specs=mine", "--log-dir=/l", "-r3", "-t0:1", "--nproc-per-node=2",
                "--local-ranks-filter=1")  # fmt: skip
    assert made.output_specs is not None
    specs: Any = made.output_specs.specs
    tee = {0: TorchStd.OUT, 1: TorchStd.NONE}
    assert specs.given == ("/l", TorchStd.ALL, tee, {1})
    assert isinstance(specs.given[1], TorchStd)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("other", "no entry point of this name in group torchrun.logs_specs; there are: .*mine"),
        ("broken", "OSError: no such disk"),
        ("nothing", "makes a int, which is no LogsSpecs"),
    ],
)
def test_what_makes_no_specification_is_said(name: str, why: str) -> None:
    """Before anything starts, under the flag and the name."""
    with pytest.raises(ValueError, match=f"^--logs-specs {name}: {why}"):
        plan(f"--logs-specs={name}")


@pytest.mark.usefixtures("installed")
def test_it_excludes_cycle_logs() -> None:
    """Both say where output goes."""
    with pytest.raises(ValueError, match="--logs-specs and --ft-per-cycle-applog-prefix exclude"):
        plan("--logs-specs=mine", "--ft-per-cycle-applog-prefix=/l/a")


def environments(nproc: int = 2) -> list[dict[str, str]]:
    """Return environments as a launch has them."""
    run = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "3"}
    return [{**run, "LOCAL_RANK": str(rank)} for rank in range(nproc)]


def outputs(specs: Any, **filters: tuple[str, ...]) -> list[Any]:
    """Return what a specification makes of two workers."""
    wanted = {Stream(name): texts for name, texts in filters.items()}
    return OutputSpecs(specs, wanted).outputs(environments(), ["/e/0", "/e/1"])


def test_torchs_own_specification_means_what_it_means_there(tmp_path: Path) -> None:
    """Files, console copies, silent ranks, filters and error files are where torchrun has them."""
    specs = DefaultLogsSpecs(str(tmp_path), TorchStd.OUT, {0: TorchStd.ERR, 1: TorchStd.OUT}, {0})
    (first, env), (second, _) = outputs(specs, stderr=("a",), stdout=("b",))
    (run,) = tmp_path.iterdir()
    cycle = run / "attempt_3"
    copy = Filter(str(cycle / "filtered_stderr.log"), ("a",))
    assert first.stdout == Target(str(cycle / "0" / "stdout.log"))
    assert first.stderr == Target(str(cycle / "0" / "stderr.log"), tee=True, filter=copy)
    assert second.stdout == Target(str(cycle / "1" / "stdout.log"))
    assert second.stderr == Target(os.devnull)
    assert first.error_file == env["TORCHELASTIC_ERROR_FILE"] == str(cycle / "0" / "error.json")


def test_torchs_specification_of_nowhere() -> None:
    """`os.devnull` as the folder of logs leaves streams alone and keeps no error files."""
    (first, env), _ = outputs(DefaultLogsSpecs(os.devnull))
    assert (first.stdout, first.stderr) == (Target(), Target())
    assert first.error_file == env["TORCHELASTIC_ERROR_FILE"] == ""


def specs_of(**fields: Any) -> Any:
    """Return a specification with these words about two workers."""
    nowhere = {0: "", 1: ""}
    dest = {"stdouts": nowhere, "stderrs": nowhere, "tee_stdouts": {}, "tee_stderrs": {}, **fields}

    def reify(envs: dict[int, dict[str, Any]]) -> SimpleNamespace:
        envs[0].update(MINE="yes", GONE=None)
        return SimpleNamespace(**dest)

    return SimpleNamespace(reify=reify)


def test_it_may_change_environments() -> None:
    """What it adds reaches the worker; an error file that it does not name stays ours."""
    (output, env), (_, other) = outputs(specs_of())
    assert env == environments()[0] | {"MINE": "yes"}
    assert other == environments()[1]
    assert output.error_file == "/e/0"


def test_a_console_copy_of_another_file_is_refused() -> None:
    """The one thing that has no place here is named with both files."""
    specs = specs_of(stdouts={0: "/l/a", 1: "/l/b"}, tee_stdouts={0: "/l/a", 1: "/l/c"})
    with pytest.raises(NvrxError, match="stdout of local rank 1 goes to '/l/b' and '/l/c' is"):
        outputs(specs)


def test_words_about_too_few_workers_are_refused() -> None:
    """A rank without a word on a stream is named."""
    with pytest.raises(NvrxError, match="no 1 for local rank 1"):
        outputs(specs_of(stderrs={0: ""}))


def test_a_specification_that_fails_is_named() -> None:
    """Its own error is in the message."""

    def reify(_: object) -> None:
        raise RuntimeError("no room")

    with pytest.raises(NvrxError, match="log specification SimpleNamespace: RuntimeError: no"):
        outputs(SimpleNamespace(reify=reify))


def test_a_program_gives_torchs_specification(tmp_path: Path) -> None:
    """`elastic_launch` takes torch's own class: output is in the files that torch would make."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        fault_tol_cfg=None,
        run_id="job",
        logs_specs=DefaultLogsSpecs(str(tmp_path), redirects=TorchStd.OUT, tee=TorchStd.OUT),
        duplicate_stdout_filters=["rank1"],
    )
    launch_agent(config, "/bin/sh", ["-c", "echo rank$LOCAL_RANK; echo other"])
    (run,) = tmp_path.iterdir()
    assert (run / "attempt_0" / "1" / "stdout.log").read_text() == "rank1\nother\n"
    copy = run / "attempt_0" / "filtered_stdout.log"
    assert copy.read_text() == "[default_role1]:rank1\n"


def test_the_entry_point_gets_one_value_for_ranks_that_are_alike() -> None:
    """Without any rank named there is nothing for each rank to say."""
    with pytest.raises(ValueError, match="no entry point"):
        load_specs("x", log_dir=None, redirects={0: Std.NONE}, tee={}, local_ranks_filter=None)
