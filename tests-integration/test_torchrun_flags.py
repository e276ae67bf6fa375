# SPDX-License-Identifier: Apache-2.0
"""Scenarios: flags of torchrun in jobs that are restarted. Ranks import no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from numactl_stub import NumactlStub

from nvidia_resiliency_ext.testing_utils.fake_hardware import FakeDriver, NoCompilerError

if TYPE_CHECKING:
    from fault_jobs import Job

RANK = """
import glob, os, time
rank, cycle = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"apple of {rank}")
print(f"plum of {rank}")
print("LOCAL_RANK", os.environ["LOCAL_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if rank == "0":
    open(f"rank_0_of_{cycle}_{os.getpid()}", "w").close()
if (rank, cycle) == ("1", "0"):
    # Who fails ends the others, whatever they have yet to say: rank 0 has left before.
    while not (said := glob.glob("rank_0_of_0_*")) or os.path.exists(
        "/proc/" + said[0].rpartition("_")[2]
    ):
        time.sleep(0.01)
    raise SystemExit(3)
"""
SPECS = """
import os
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

class Flat(LogsSpecs):
    def reify(self, envs):
        cycle = envs[0]["TORCHELASTIC_RESTART_COUNT"]
        paths = {r: os.path.join(self._root_log_dir, f"c{cycle}_r{env['RANK']}.log")
                 for r, env in envs.items()}
        errors = {r: "" for r in envs}
        return LogsDest(paths, paths, {}, {}, errors, "", "")

    @property
    def root_log_dir(self):
        return self._root_log_dir
"""


@pytest.fixture
def program(job: Job) -> Path:
    """Give a rank that says who it is."""
    path = job.folder / "rank.py"
    path.write_text(RANK)
    return path


@pytest.mark.parametrize("prewarm", ["off", "on"])
def test_filters_and_virtual_local_ranks(job: Job, program: Path, prewarm: str) -> None:
    """Each cycle has one file with the wanted lines of all ranks; each rank has its one device."""
    job.start(
        flags=[
            *("--log-dir", str(job.folder / "logs"), "--tee", "3", "--virtual-local-rank"),
            *("--duplicate-stdout-filters", "apple,LOCAL_RANK", "--ft-prewarm-import", "decimal"),
        ],
        prewarm=prewarm,
        program=program,
        environment={"CUDA_VISIBLE_DEVICES": "4,6"},
    )
    assert job.wait() == 0, job.log()
    for cycle in range(2):
        (path,) = job.folder.glob(f"logs/*/attempt_{cycle}/filtered_stdout.log")
        assert sorted(path.read_text().splitlines()) == [
            "[default0]:LOCAL_RANK 0 4",
            "[default0]:apple of 0",
            "[default1]:LOCAL_RANK 0 6",
            "[default1]:apple of 1",
        ]
    assert "[default1]:plum of 1" in job.log()


def test_workers_are_bound_to_cpus_near_their_gpus(job: Job, program: Path) -> None:
    """The driver says where GPUs sit, /sys which CPUs are near; each rank runs under numactl."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    devices = Path("/sys/bus/pci/devices")
    known = [d for d in sorted(devices.iterdir()) if (d / "numa_node").exists()]
    if len(known) < 2 or not Path("/sys/devices/system/node/node0/cpulist").exists():
        pytest.skip("this machine does not say where PCI devices sit")
    (job.folder / "nvml").mkdir()
    try:
        driver = FakeDriver(
            str(job.folder / "nvml"),
            {"count": 2, "bus.0": f"0000{known[0].name}", "bus.1": f"0000{known[1].name}"},
        )
    except NoCompilerError as error:
        pytest.skip(str(error))
    numactl = NumactlStub(job.folder)
    job.start(
        flags=["--numa-binding", "node"],
        program=program,
        environment={
            **driver.environment(),
            **numactl.environment(),
        },
    )
    assert job.wait() == 0, job.log()
    words = numactl.calls()
    assert len(words) == 4
    assert all(word.startswith("--physcpubind=") and word[-1].isdigit() for word in words)


def test_a_log_specification_of_ones_own(job: Job, program: Path) -> None:
    """An entry point says for each cycle where output goes, and workers start cold."""
    pytest.importorskip("torch")
    site = job.folder / "site"
    info = site / "flat-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "flat_specs.py").write_text(SPECS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flat\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nflat = flat_specs:Flat\n")
    logs = job.folder / "logs"
    logs.mkdir()
    job.start(
        flags=["--logs-specs", "flat", "--log-dir", str(logs), "--event-log-handler", "console"],
        prewarm="auto",
        program=program,
        environment={"PYTHONPATH": str(site)},
    )
    assert job.wait() == 0, job.log()
    assert {path.name for path in logs.glob("c*")} == {f"c{c}_r{r}.log" for c in "01" for r in "01"}
    assert "apple of 1\n" in (logs / "c1_r1.log").read_text()
    assert "a log specification says only at the start of a cycle" in job.log()
    states = [line.partition("worker.status.")[2].partition('"')[0] for line in events_of(job)]
    assert states == ["START"] * 4 + ["SUCCEEDED"] * 3


def events_of(job: Job) -> list[str]:
    """Return the events that torch's handler wrote to the console."""
    return [line for line in job.log().splitlines() if '"torchelastic.worker.status.' in line]


def test_an_unknown_log_specification_is_a_wrong_command_line(job: Job, program: Path) -> None:
    """Nothing is started: one line, exit code 2."""
    job.start(flags=["--logs-specs", "nobody"], program=program)
    assert job.wait() == 2
    assert job.log().count("\n") == 1, (job.log(), sys.version)
