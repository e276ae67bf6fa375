# SPDX-License-Identifier: Apache-2.0
"""The denylist of the scheduler: which unit a node is, what files mean, and that doubt passes."""

import logging
import os

import pytest

from nvidia_resiliency_ext.fault_tolerance._health.admission import NodeChecks, unfit
from nvidia_resiliency_ext.fault_tolerance._health.segment_health import (
    Unit,
    read_denylist,
    state_file,
    state_text,
    task_file,
    unit_of,
)
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig

TASK = Unit("123", "7")
JOB = Unit("123", "123")
ARRAY = {"SLURM_JOB_ID": "130", "SLURM_ARRAY_JOB_ID": "123", "SLURM_ARRAY_TASK_ID": "7"}


@pytest.mark.parametrize(
    ("environ", "unit"),
    [
        (ARRAY, TASK),
        ({"SLURM_JOB_ID": "123"}, JOB),
        ({"SLURM_JOB_ID": "123", "SLURM_ARRAY_TASK_ID": "7"}, JOB),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "../x"}, None),
        ({}, None),
    ],
)
def test_a_unit_is_an_array_task_or_a_plain_job(environ, unit):
    """In an array the task is the unit, else the job; ids that are no numbers name no file."""
    assert unit_of(environ) == unit


@pytest.mark.parametrize("unit", [TASK, JOB])
def test_a_file_with_content_excludes_one_unit(tmp_path, unit):
    """A file of the unit that is not empty excludes it, with its words, and no other unit."""
    path = tmp_path / f"segment_health_check.123.{unit.task_id}"
    path.write_text("")
    assert read_denylist(str(tmp_path), unit) is None
    path.write_text("node4: drained\n  node5: \x1b[2Jdown\n")
    found = read_denylist(str(tmp_path), unit)
    assert (found.path, found.reason) == (str(path), "node4: drained node5: ?[2Jdown")
    assert read_denylist(str(tmp_path), Unit("123", "8")) is None


@pytest.mark.parametrize("unit", [TASK, JOB])
def test_one_file_lists_all_excluded_units(tmp_path, unit):
    """The first line lists excluded tasks, later lines are evidence; a task gets its own lines."""
    path = tmp_path / "segment_health_check.123.state"
    path.write_text(state_text({unit.task_id: ["node5 down"], "12": ["node9 drained"]}))
    assert '"12"' in path.read_text().splitlines()[0]
    found = read_denylist(str(tmp_path), unit)
    assert (found.path, found.reason) == (str(path), f"{unit.task_id}: node5 down")
    assert read_denylist(str(tmp_path), Unit("123", "8")) is None
    assert read_denylist(str(tmp_path), Unit("12", "7")) is None
    path.write_text('["7","123"]\nsomebody wrote this by hand')
    assert read_denylist(str(tmp_path), unit).reason == "somebody wrote this by hand"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[7]",
        b'{"7": 1}',
        b'"7"',
        b"7",
        b"\xff",
        b"[" * 5000,
        b'["7",' + b" " * 8192 + b'"8"]',
    ],
)
def test_a_list_that_is_none_warns_and_excludes_nobody(tmp_path, caplog, content):
    """Whatever is no array of texts in the first 8 KiB is one WARNING, and the unit works."""
    (tmp_path / "segment_health_check.123.state").write_bytes(content)
    with caplog.at_level(logging.WARNING, "nvrx"):
        assert read_denylist(str(tmp_path), TASK) is None
    assert "excludes nobody" in caplog.text


def test_a_list_is_read_up_to_its_limit(tmp_path):
    """A first line of 8 KiB still counts."""
    line = '["7","' + "1" * (8192 - 8) + '"]'
    assert len(line) == 8192
    (tmp_path / "segment_health_check.123.state").write_text(line)
    assert read_denylist(str(tmp_path), TASK) is not None


@pytest.mark.parametrize("kind", ["directory", "pipe", "loop", "no directory"])
def test_what_is_no_readable_file_is_passed_over(tmp_path, caplog, kind):
    """Another type of file, or one that cannot be read, is one WARNING each, without waiting."""
    folder = tmp_path / "dir"
    folder.mkdir()
    for path in (task_file(str(folder), TASK), state_file(str(folder), "123")):
        if kind == "directory":
            os.mkdir(path)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "loop":
            os.symlink(path, path)
    if kind == "no directory":
        folder.rmdir()
        folder.write_text("a file")
    with caplog.at_level(logging.WARNING, "nvrx"):
        assert read_denylist(str(folder), TASK) is None
    assert caplog.text.count("passed over") == 2
    caplog.clear()
    assert read_denylist(str(tmp_path / "missing"), TASK) is None
    assert not caplog.records


def test_an_excluded_unit_makes_each_of_its_nodes_unfit(tmp_path):
    """A launcher of any SLURM_PROCID obeys; the cause names file, unit and reason, each round."""
    config = FaultToleranceConfig(segment_health_check_dir=str(tmp_path))
    checks = NodeChecks(config, None, {**ARRAY, "SLURM_PROCID": "3"})
    assert unfit(checks.run(), "h") is None
    path = tmp_path / "segment_health_check.123.7"
    path.write_text("node4: drained by ops")
    cause = unfit(checks.run(), "h")
    assert cause.kind == "unhealthy"
    assert f"array task 7 of job 123 by {path}: node4: drained by ops" in cause.what
    assert cause.detail["check"] == "segment"
    assert "drained by ops" in cause.detail["evidence"]
    path.unlink()
    assert unfit(checks.run(), "h") is None


def test_outside_slurm_nothing_is_excluded(tmp_path):
    """Without a Slurm job there is no unit, and the check is skipped."""
    config = FaultToleranceConfig(segment_health_check_dir=str(tmp_path))
    (result,) = (r for r in NodeChecks(config, None, {}).run() if r.name == "segment")
    assert result.status == "skipped"


def test_the_directory_is_an_absolute_path():
    """Flag, its older spelling and key name it; a relative path is refused."""
    for flag in ("--ft-segment-health-check-dir", "--ft-segment_health_check_dir"):
        args = parse_args([flag, "/shared/health", "train.py"])
        config = FaultToleranceConfig.from_args(args)
        assert config.segment_health_check_dir == "/shared/health"
    with pytest.raises(ValueError, match="segment_health_check_dir"):
        FaultToleranceConfig(segment_health_check_dir="health")
