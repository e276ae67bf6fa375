# SPDX-License-Identifier: Apache-2.0
"""A store's process that somebody has stopped is found by its job, and goes on."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nvidia_resiliency_ext.inprocess._store.names import job_of
from nvidia_resiliency_ext.inprocess._store_server.hosting import PROGRAM, resume_store_servers

JOB = f"stopped-{os.getpid()}"


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    """Yield two stopped processes that look like store servers, the second one of another job."""
    names = [f"--job={JOB}", f"--job={JOB}-2"]
    command = [sys.executable, "-c", "input()", PROGRAM]
    made = [subprocess.Popen([*command, name], stdin=subprocess.PIPE) for name in names]
    for process in made:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    yield [process.pid for process in made]
    for process in made:
        process.kill()
        process.communicate()


def test_only_stopped_processes_of_the_job_go_on(stopped: list[int]) -> None:
    """The job's own process goes on; another job's does not, and one that runs is left alone."""
    assert resume_store_servers("no-such-job") == 0
    assert resume_store_servers(JOB) == 1
    os.waitid(os.P_PID, stopped[0], os.WCONTINUED)
    assert resume_store_servers(JOB) == 0
    assert resume_store_servers(f"{JOB}-2") == 1


def test_the_job_stands_before_all_keys() -> None:
    """A monitor knows its job by what stands before the keys of a call."""
    assert job_of("nvrx/train-7/0.1/3/nonce/") == "train-7"
    assert job_of("elsewhere") == ""
