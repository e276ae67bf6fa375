# SPDX-License-Identifier: Apache-2.0
"""The publisher of Slurm's unavailable nodes: what it asks, what it writes, what it keeps."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from nvidia_resiliency_ext.fault_tolerance import slurm_health
from nvidia_resiliency_ext.fault_tolerance._core.infra import (
    expand_nodelist,
    hostnames_to_slurm_nodelist,
)
from nvidia_resiliency_ext.fault_tolerance._health.segment_health import Unit, read_denylist
from nvidia_resiliency_ext.fault_tolerance.slurm_health import (
    SlurmAnswerError,
    excluded_units,
    publish,
    unavailable_nodes,
)

SINFO = """\
node1|allocated|none
node2|draining|fan: broken | twice
node3|down*|Not responding
node4|mixed*|none
node5|drained$|none
node6|idle~|none
"""
ARRAY = "0|node1\n1|node[2-3]\n2|node[4,6]\n3|\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3,07]", ["n1", "n2", "n3", "n07"]),
        ("r[1-2]n[01,04],x", ["r1n01", "r1n04", "r2n01", "r2n04", "x"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
    ],
)
def test_slurms_lists_of_nodes_are_read(text, names):
    """Ranges, leading zeros, several brackets and names around them."""
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n]1[", "n[1-9999999]", "n[]"])
def test_what_is_no_list_of_nodes_is_refused(text):
    """A cut or absurd list is an error, and no name of a node."""
    with pytest.raises(ValueError, match=r"list|number|range|nodes"):
        expand_nodelist(text)


def test_lists_of_nodes_survive_the_way_there_and_back():
    """What is written in Slurm's form names the same nodes when it is read."""
    rng = random.Random(7)
    for _ in range(200):
        names = {f"rack{rng.randrange(3)}-n{rng.randrange(120):03d}" for _ in range(20)}
        assert set(expand_nodelist(hostnames_to_slurm_nodelist(sorted(names)))) == names


def test_unavailable_is_what_sinfo_shows_reasons_for():
    """Down, drained, draining and failing nodes are unavailable, whatever else is so of them."""
    assert unavailable_nodes(SINFO) == {
        "node2": "node2 draining: fan: broken | twice",
        "node3": "node3 down*: Not responding",
        "node5": "node5 drained$",
    }


def test_a_task_with_one_bad_node_is_excluded():
    """Tasks of an array are units of their own; a plain job is one; waiting tasks have no nodes."""
    bad = unavailable_nodes(SINFO)
    assert excluded_units(ARRAY, "77", bad) == {"1": [bad["node2"], bad["node3"]]}
    assert excluded_units("N/A|node[1-2]\n", "80", bad) == {"80": [bad["node2"]]}
    assert excluded_units("", "77", bad) == {}


@pytest.mark.parametrize("squeue", ["1\n", "1|node[2\n", "garbage"])
def test_an_answer_that_is_none_is_refused(squeue):
    """What Slurm did not say so excludes nobody and clears nothing."""
    with pytest.raises(SlurmAnswerError):
        excluded_units(squeue, "77", {})


class FakeSlurm:
    """Programs named as Slurm's that print files, or do what a test says."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("sinfo", "squeue"):
            self.does(name, f'cat "{folder}/{name}.out"')
        self.says(SINFO, ARRAY)

    def does(self, name, text):
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "$0 $*" >> "{self.folder}/calls"\n{text}\n')
        path.chmod(0o755)

    def says(self, sinfo, squeue):
        (self.folder / "sinfo.out").write_text(sinfo)
        (self.folder / "squeue.out").write_text(squeue)

    @property
    def environ(self):
        return {"PATH": f"{self.folder}:/usr/bin:/bin"}


@pytest.fixture
def slurm(tmp_path):
    """Give a Slurm of our own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return FakeSlurm(folder)


@pytest.fixture
def files(tmp_path):
    """Give the directory of the files."""
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


def test_a_launcher_reads_what_is_published(slurm, files):
    """The file excludes the tasks with bad nodes, and is gone as soon as they are well."""
    publish(str(files), "77", slurm.environ)
    (path,) = files.iterdir()
    assert path.name == "segment_health_check.77.state"
    assert json.loads(path.read_text().splitlines()[0]) == ["1"]
    assert path.stat().st_mode & 0o777 == 0o644
    found = read_denylist(str(files), Unit("77", "1"))
    assert "node2 draining: fan: broken" in found.reason
    assert read_denylist(str(files), Unit("77", "0")) is None
    assert "--jobs=77" in (slurm.folder / "calls").read_text()
    # The task has come back on other nodes: what was said of it is stale.
    slurm.says(SINFO, "0|node1\n1|node[4,6]\n")
    publish(str(files), "77", slurm.environ)
    assert list(files.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "text", "problem"),
    [
        ("sinfo", "echo Unable to contact >&2; exit 1", "sinfo ended with exit code 1: Unable"),
        ("squeue", "echo nonsense", "squeue printed"),
        ("squeue", "exec sleep 100", "squeue has not answered within 5 s"),
    ],
)
def test_without_an_answer_the_file_stays(slurm, files, monkeypatch, program, text, problem):
    """A controller that fails, hangs or talks nonsense neither excludes nor clears anything."""
    publish(str(files), "77", slurm.environ)
    (path,) = files.iterdir()
    before = path.read_bytes()
    slurm.says("node1|down|x\n", ARRAY)
    slurm.does(program, text)
    if "within" in problem:
        monkeypatch.setattr(slurm_health, "COMMAND_DEADLINE_S", 5)
    with pytest.raises(SlurmAnswerError, match=problem):
        publish(str(files), "77", slurm.environ)
    assert [(p, p.read_bytes()) for p in files.iterdir()] == [(path, before)]


def test_a_missing_directory_is_a_mistake(slurm, tmp_path):
    """It is said also when there is nothing to write."""
    slurm.says("", "")
    with pytest.raises(FileNotFoundError):
        publish(str(tmp_path / "missing"), "77", slurm.environ)


def run(slurm, *arguments, **environ):
    """Run the program to its end."""
    return subprocess.run(
        [sys.executable, "-m", slurm_health.__name__, *arguments],
        env={**slurm.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_program_looks_once(slurm, files):
    """The job comes from Slurm's variables; a user's own filters do not count; 1 without answer."""
    array = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "79"}
    slurm.does("squeue", f'[ -z "$SQUEUE_STATES" ] && cat "{slurm.folder}/squeue.out"')
    done = run(slurm, str(files), **array, SQUEUE_STATES="PENDING")
    assert (done.returncode, done.stdout) == (0, "")
    assert "excluded: array task 1 of job 77 (node2 draining: fan: broken | twice;" in done.stderr
    slurm.does("sinfo", "exit 3")
    done = run(slurm, str(files), "--job-id", "77")
    assert done.returncode == 1
    assert "nothing is changed: sinfo ended with exit code 3" in done.stderr
    assert len(list(files.iterdir())) == 1


@pytest.mark.parametrize("arguments", [[], ["x"], ["/x", "--job-id", "../y"], ["/x", "--every=0"]])
def test_a_wrong_command_line_is_one_line_and_2(slurm, arguments):
    """No job, no absolute directory, no number: exit code 2 before Slurm is asked."""
    done = run(slurm, *arguments, "--job-id=5") if arguments == ["x"] else run(slurm, *arguments)
    assert done.returncode == 2
    assert "nvrx-slurm-health: error:" in done.stderr
    assert not (slurm.folder / "calls").exists()


def test_the_program_looks_again_until_a_signal(slurm, files):
    """A node that is drained later is found; SIGTERM ends the program with 0, nothing half done."""
    slurm.says("", ARRAY)
    command = [sys.executable, "-m", slurm_health.__name__, str(files), "--job-id=77"]
    with subprocess.Popen([*command, "--every=0.05"], env=slurm.environ) as process:
        try:
            _until((slurm.folder / "calls").exists)
            slurm.says(SINFO, ARRAY)
            _until(lambda: read_denylist(str(files), Unit("77", "1")))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert os.listdir(files) == ["segment_health_check.77.state"]


def test_the_program_ends_with_the_batch_script(slurm, files):
    """A script that ends leaves no publisher behind, whatever ended it."""
    slurm.says("", ARRAY)
    command = f"{sys.executable} -m {slurm_health.__name__} {files} --job-id=77 --every=0.05"
    # The script's own output stays open for as long as the publisher lives.
    script = ["sh", "-c", f"{command} & read -r _"]
    with subprocess.Popen(
        script, env=slurm.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as batch:
        _until((slurm.folder / "calls").exists)
        batch.kill()
        assert batch.stdout.read() == b""


def _until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
