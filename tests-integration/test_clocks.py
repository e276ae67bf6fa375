# SPDX-License-Identifier: Apache-2.0
"""Scenarios: the wall clock of one host is minutes off; it is named, and nothing depends on it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nvidia_resiliency_ext.shared_utils.events import read_events
from nvidia_resiliency_ext.shared_utils.report import build_timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from many_nodes import NodesJob

pytestmark = pytest.mark.netns

SOURCE = Path(__file__).parent / "programs" / "wall_clock_off.c"
AHEAD_S = 300
STEPS = 80
FLAGS = ("--ft-prewarm", "off", "--ft-lease", "1")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what, loaded before libc, makes a process's wall clock wrong."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("clock") / "wall_clock_off.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, SOURCE, "-ldl"], check=True)
    return made


def ahead(job: NodesJob, library: Path) -> Mapping[str, str]:
    """Return the environment of a host whose wall clock is five minutes ahead."""
    # The folder is what hosts see of this machine's /tmp.
    there = shutil.copy(library, job.folder)
    return {"LD_PRELOAD": there, "NVRX_TEST_CLOCK_OFF": str(AHEAD_S)}


@pytest.mark.slow
def test_a_host_whose_clock_is_off_is_named_and_works(
    nodes_job: Callable[..., NodesJob], library: Path
) -> None:
    """Five minutes ahead: named in every launcher's log; a restart, the result and the report."""
    job = nodes_job(2)
    wrong = job.network[1]
    right = [host for host in job.network if host is not wrong]
    how = {"nnodes": 2, "flags": FLAGS}
    words = ("--steps", str(STEPS), "--step-ms", "20")
    job.start(*words, hosts=right, **how)
    job.start(*words, hosts=[wrong], environment=ahead(job, library), **how)
    job.wait_for_step(0, 3, ranks=2)
    job.signal_rank(0, 1)
    assert set(job.wait().values()) == {0}, job.tails()
    job.assert_counted(STEPS)
    job.assert_fenced()
    assert job.cycles() == [0, 1]
    for host in job.network:
        assert f"{wrong.name} is " in job.log(host), job.tails()
        assert "s ahead; synchronise them" in job.log(host), job.tails()
    files = sorted(job.events_folder.glob("events-*.jsonl"))
    timeline = build_timeline([read_events(str(path)) for path in files])
    assert len(timeline.hosts) == 2
    assert timeline.wall_s < AHEAD_S / 2


@pytest.mark.slow
def test_check_names_the_host_whose_clock_is_off(
    nodes_job: Callable[..., NodesJob], library: Path
) -> None:
    """`--check` on two hosts: the clock that is off fails, by name, on all of them."""
    job = nodes_job(2)
    wrong = job.network[1]
    check = ("--check", "--json")
    job.start(hosts=[h for h in job.network if h is not wrong], nnodes=2, flags=check)
    job.start(hosts=[wrong], environment=ahead(job, library), nnodes=2, flags=check)
    assert set(job.wait().values()) == {1}, job.tails()
    for host in job.network:
        text = job.log(host)
        (found,) = (
            item
            for item in json.loads(text[text.index("{") :])["checks"]
            if item["name"] == "clocks"
        )
        assert found["status"] == "fail", found
        assert f"{wrong.name} is {AHEAD_S}" in found["text"], found
