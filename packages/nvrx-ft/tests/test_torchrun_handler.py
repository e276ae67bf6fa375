# SPDX-License-Identifier: Apache-2.0
"""The handler of `torchrun --rdzv-backend=nvrx`: how a job ends, what is recorded."""

import contextlib
import json
import os
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from handler_nodes import DEADLINE_S, Nodes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
)

from nvidia_resiliency_ext.fault_tolerance._torchrun_handler import TorchrunHandler
from nvidia_resiliency_ext.fault_tolerance.ft_rendezvous_barrier import make_handler

ENTRY = "nvidia_resiliency_ext.fault_tolerance.torchrun:get_handler_creator"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture
def job(monkeypatch):
    """Give a maker of jobs."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    made = []

    def create(store, _backend, params):
        return make_handler(TorchrunHandler, store, params)

    def make(min_nodes, max_nodes, **conf):
        made.append(Nodes(create, min_nodes, max_nodes, **conf))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


def shut_down(handler, error=None):
    """Let go of a handler as torch's `launch_agent` does, in its `finally`."""
    with contextlib.suppress(OSError, ChildFailedError):
        try:
            if error is not None:
                raise error
        finally:
            handler.shutdown()


def until(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_error_of_one_launcher_is_its_own(job):
    """It leaves, and a spare takes its place in the next round; the job goes on and ends well."""
    nodes = job(2, 3)
    host, other, spare = (nodes.add(host=number == 0) for number in range(3))
    calls = [nodes.call(handler.next_rendezvous) for handler in (host, other)]
    assert {call.result(DEADLINE_S).world_size for call in calls} == {2}
    waits = nodes.call(spare.next_rendezvous)
    shut_down(other, OSError("no space left on device"))
    until(lambda: host.num_nodes_waiting() > 0)
    assert nodes.call(host.next_rendezvous).result(DEADLINE_S).world_size == 2
    assert waits.result(DEADLINE_S).world_size == 2
    assert not host.is_closed()
    shut_down(host)
    until(spare.is_closed)
    assert spare.get_shutdown_reason() == "graceful"


def test_workers_that_failed_for_good_end_the_job_as_failed(job):
    """With no restart left the job is over for all, and spares do not leave as if it were well."""
    nodes = job(1, 2)
    works = nodes.add(host=True)
    nodes.join(works)
    waits = nodes.call(nodes.add().next_rendezvous)
    shut_down(works, ChildFailedError("train.py", {0: ProcessFailure(0, 1, 1, "/missing")}))
    with pytest.raises(RendezvousClosedError, match="failure"):
        waits.result(DEADLINE_S)


def test_spares_leave_in_peace_when_the_job_is_done(job):
    """More launchers than the largest number are spares, too."""
    nodes = job(1, 1)
    works = nodes.add(host=True)
    nodes.join(works)
    waits = [nodes.call(nodes.add().next_rendezvous) for _ in range(3)]
    shut_down(works)
    for wait in waits:
        with pytest.raises(RendezvousGracefulExitError):
            wait.result(DEADLINE_S)


def test_more_launchers_than_wanted_are_spares_in_every_round(job):
    """Five launchers for 2:3 and six restarts: two work, three wait, none is told of an error."""
    nodes = job(2, 3, last_call_timeout=10)
    handlers = [nodes.add(host=number == 0) for number in range(5)]
    working = handlers[:2]
    nodes.join(*working)
    waits = [nodes.call(spare.next_rendezvous) for spare in handlers[2:]]
    for round_ in range(1, 7):
        places = nodes.join(*working)
        assert sorted(place.rank for place in places) == [0, 1]
        assert {place.world_size for place in places} == {2}
        assert working[0].round() == round_
        assert not any(wait.done() for wait in waits)
    shut_down(working[0])
    for wait in waits:
        with pytest.raises(RendezvousGracefulExitError):
            wait.result(DEADLINE_S)


def test_the_record_tells_cycles_and_the_end(job, tmp_path, monkeypatch):
    """Start, cycles with their reasons, and end; what workers record comes into the same file."""
    monkeypatch.setenv("NVRX_EVENT_DIR", str(tmp_path))
    monkeypatch.setenv("NVRX_LAUNCH_ID", "to be replaced")
    monkeypatch.delenv("NVRX_CYCLE", raising=False)
    nodes = job(1, 1)
    works = nodes.add(host=True)
    nodes.join(works)
    assert os.environ["NVRX_CYCLE"] == "0"
    nodes.join(works)
    assert os.environ["NVRX_CYCLE"] == "1"
    shut_down(works)
    (path,) = tmp_path.glob("events-*.jsonl")
    assert os.environ["NVRX_LAUNCH_ID"] in path.name
    events = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    reported = [(e["kind"], e.get("cycle")) for e in events]
    assert reported == [
        ("job_start", None),
        ("cycle_start", 0),
        ("fault", 0),
        ("cycle_end", 0),
        ("cycle_start", 1),
        ("cycle_end", 1),
        ("job_end", None),
    ]
    assert events[-1]["result"] == "success"
    assert "torchrun's log" in events[4]["reason"]


def test_torch_finds_the_handler_by_the_name_of_the_project():
    """The entry point of the distribution loads, and its handler is known as nvrx to torch."""
    assert f'"torchrun.handlers"]\nnvrx = "{ENTRY}"\n' in PYPROJECT.read_text()
    creator = EntryPoint("nvrx", ENTRY, "torchrun.handlers").load()()
    assert callable(creator)
    assert TorchrunHandler.get_backend(None) == "nvrx"


def test_other_torchruns_do_not_pay_for_it():
    """Loading the entry point, as every torchrun does, imports none of our rendezvous."""
    program = (
        f"import sys, importlib; importlib.import_module({ENTRY.split(':', maxsplit=1)[0]!r})\n"
        "mine = [name for name in sys.modules if '_rendezvous' in name or '_torch' in name]\n"
        "print(mine, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[] False"
