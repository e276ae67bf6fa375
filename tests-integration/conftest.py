# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the integration scenarios: a job that is closed, and leaves nothing, in the end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import ports
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))

from fault_jobs import Job
from hosts import Network, why_not
from many_nodes import LAUNCHER, NodesJob
from slurm_cluster import why_no_slurm

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

HOSTS_LIMIT_S = 300.0

_has_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether a test has failed: what it then leaves says nothing."""
    report = yield
    item.stash[_has_failed] = item.stash.get(_has_failed, False) or report.failed
    return report


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Give a job that has not started; at the end of a good test nothing of it may be left.

    Its folder has a short path: Unix sockets go into it.
    """
    folder = Path(tempfile.mkdtemp(prefix="nvrx-it-", dir="/tmp"))
    made = Job(folder)
    try:
        yield made
        if not request.node.stash[_has_failed]:
            request.node.add_marker("no_second_try")
            made.assert_nothing_left()
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def port() -> Iterator[int]:
    """Give a port at which nobody listens, and that no other test is given."""
    with ports.claimed() as claimed:
        yield claimed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what may take longest: of two at a time, none is left for the end alone.

    A job on several hosts has the time to reach its own deadlines, which say what is missing.
    """
    for item in items:
        if item.get_closest_marker("netns") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(HOSTS_LIMIT_S))

    def limit_s(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return float(mark.args[0]) if mark else 0.0

    items.sort(key=limit_s, reverse=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs hosts made of namespaces, or Slurm, where these cannot be had."""
    if item.get_closest_marker("slurm") and (reason := why_no_slurm()):
        pytest.skip(reason)
    if item.get_closest_marker("netns") and (reason := why_not()):
        pytest.skip(reason)


@pytest.fixture
def nodes_job(request: pytest.FixtureRequest) -> Iterator[Callable[..., NodesJob]]:
    """Give a maker of jobs on hosts of their own; a good test leaves nothing on the hosts.

    It is called with the number of hosts, and with whatever else `Network` takes; a test that uses
    it is marked `netns`. The clocks of the hosts are apart.
    """
    with contextlib.ExitStack() as stack:
        made: list[NodesJob] = []

        def make(count: int, *, launcher: str = LAUNCHER, **more: object) -> NodesJob:
            folder = Path(tempfile.mkdtemp(prefix="nvrx-it-", dir="/tmp"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            options = {"keep": [folder], "clocks_apart": True, **more}
            network = stack.enter_context(Network(count, **options))
            made.append(NodesJob(network, folder, launcher=launcher))
            return made[-1]

        yield make
        if not request.node.stash[_has_failed]:
            request.node.add_marker("no_second_try")
        for job in made:
            if job.launcher == LAUNCHER and not request.node.stash[_has_failed]:
                job.assert_nothing_left()
