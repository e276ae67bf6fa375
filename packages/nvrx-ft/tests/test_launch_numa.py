# SPDX-License-Identifier: Apache-2.0
"""Which CPUs workers are bound to: on machines of our making, and beside torch's own answer."""

from __future__ import annotations

import functools
import io
import os
import random
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._config.syntax import NUMA_MODES
from nvidia_resiliency_ext.fault_tolerance._torch import elastic
from nvidia_resiliency_ext.fault_tolerance._workers import command
from nvidia_resiliency_ext.fault_tolerance._workers.command import cpu_binding
from nvidia_resiliency_ext.fault_tolerance._workers.numa import (
    MachineTopology,
    cpus_near,
    read_ranges,
)
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance.launcher import LaunchConfig
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks


class Machine:
    """A folder like /sys: nodes of cores of two threads, a cache per `cores_per_cache`."""

    def __init__(
        self,
        root: Path,
        nodes: Sequence[int] = (4, 4),
        gpus: Sequence[int] = (0, 0, 1, 1),
        *,
        nodes_per_socket: int = 1,
        cores_per_cache: int = 2,
    ) -> None:
        self.root = root
        self.gpus = [f"0000:{0x10 + index:02x}:00.0" for index in range(len(gpus))]
        cores = sum(nodes)
        self._write("devices/system/node/possible", f"0-{len(nodes)}")
        first = 0
        for node, count in enumerate(nodes):
            mine = range(first, first + count)
            first += count
            cpus = [*mine, *(cores + core for core in mine)]
            self._write(f"devices/system/node/node{node}/cpulist", format_ranks(cpus))
            for place, core in enumerate(mine):
                group = mine[place - place % cores_per_cache :][:cores_per_cache]
                shared = format_ranks([*group, *(cores + each for each in group)])
                for cpu in (core, cores + core):
                    folder = f"devices/system/cpu/cpu{cpu}"
                    self._write(f"{folder}/topology/physical_package_id", node // nodes_per_socket)
                    siblings = format_ranks([core, cores + core])
                    self._write(f"{folder}/topology/thread_siblings_list", siblings)
                    caches = (
                        (1, "Data", siblings),
                        (9, "Instruction", "0"),
                        (3, "Unified", shared),
                    )
                    for index, (level, kind, cpus_of_cache) in enumerate(caches):
                        self._write(f"{folder}/cache/index{index}/level", level)
                        self._write(f"{folder}/cache/index{index}/type", kind)
                        self._write(f"{folder}/cache/index{index}/shared_cpu_list", cpus_of_cache)
                    self._write(f"{folder}/cache/uevent", "")
        # The memory of a GPU may be a node without CPUs.
        self._write(f"devices/system/node/node{len(nodes)}/cpulist", "")
        for address, node in zip(self.gpus, gpus, strict=True):
            self._write(f"bus/pci/devices/{address}/numa_node", node)
        self.cpus = frozenset(range(2 * cores))

    def topology(self, allowed: Sequence[int] | None = None) -> MachineTopology:
        """Return what is read of it."""
        return MachineTopology(str(self.root), self.cpus if allowed is None else allowed)

    def _write(self, path: str, value: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", ["0-3,8-11", "0-3,8-11", "4-7,12-15", "4-7,12-15"]),
        ("socket", ["0-15"] * 4),
        ("exclusive", ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        ("core-complex", ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
    ],
)
def test_each_mode_on_a_machine_of_two_nodes(
    tmp_path: Path, mode: str, expected: list[str]
) -> None:
    """Node: all its CPUs; socket: those of its nodes; exclusive: a share; core complex: one."""
    machine = Machine(tmp_path, nodes_per_socket=2)
    found = [format_ranks(cpus_near(mode, machine.gpus, r, machine.topology())) for r in range(4)]
    assert found == expected


def test_cores_that_are_left_over_go_to_the_first(tmp_path: Path) -> None:
    """Five cores for two GPUs: three and two, both threads of each."""
    machine = Machine(tmp_path, nodes=(5,), gpus=(0, 0))
    shares = [cpus_near("exclusive", machine.gpus, rank, machine.topology()) for rank in range(2)]
    assert [format_ranks(share) for share in shares] == ["0-2,5-7", "3-4,8-9"]


def test_only_cpus_that_may_be_used_count(tmp_path: Path) -> None:
    """A container that has some CPUs of a node shares these out; without any it is an error."""
    machine = Machine(tmp_path)
    topology = machine.topology(allowed=[1, 2, 9])
    assert cpus_near("node", machine.gpus, 0, topology) == {1, 2, 9}
    assert cpus_near("exclusive", machine.gpus, 0, topology) == {1, 9}
    assert cpus_near("exclusive", machine.gpus, 1, topology) == {2}
    with pytest.raises(ValueError, match="none of the CPUs of NUMA node 1"):
        cpus_near("node", machine.gpus, 2, topology)
    with pytest.raises(ValueError, match="NUMA node 0 has 1 cores to use for 2 GPUs"):
        cpus_near("exclusive", machine.gpus, 0, machine.topology(allowed=[0, 8]))


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_torchs(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines at random, every mode gives every rank the CPUs that torchrun gives it."""
    binding = pytest.importorskip("torch.numa.binding", reason="needs a torch with NUMA binding")
    chance = random.Random(seed)
    nodes = [chance.randint(2, 6) for _ in range(chance.choice((1, 2, 4)))]
    gpus = sorted(chance.randrange(len(nodes)) for _ in range(chance.randint(1, 6)))
    machine = Machine(
        tmp_path,
        nodes,
        gpus,
        nodes_per_socket=chance.choice((1, 2)),
        cores_per_cache=chance.randint(1, 3),
    )
    # torch wants a CPU of every node that is possible.
    (tmp_path / "devices/system/node/possible").write_text(f"0-{len(nodes) - 1}\n")
    allowed = machine.cpus
    if chance.random() < 0.5:
        allowed = frozenset(cpu for cpu in allowed if cpu % 3 or cpu < 2 * len(nodes))

    def below(path: str) -> str:
        return str(tmp_path) + path.removeprefix("/sys") if path.startswith("/sys/") else path

    def device(index: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x10 + index, pci_device_id=0)

    seen = types.SimpleNamespace(
        listdir=lambda path: os.listdir(below(path)),
        path=os.path,
        sched_getaffinity=lambda _: set(allowed),
    )
    cuda = types.SimpleNamespace(device_count=lambda: len(gpus), get_device_properties=device)
    # torch reads every file once for each mode and rank.
    text_of = functools.cache(lambda path: Path(path).read_text())
    monkeypatch.setattr(
        binding, "open", lambda path: io.StringIO(text_of(below(path))), raising=False
    )
    monkeypatch.setattr(binding, "os", seen)
    monkeypatch.setattr(binding, "torch", types.SimpleNamespace(cuda=cuda))
    topology = machine.topology(sorted(allowed))
    for mode in NUMA_MODES:
        options = binding.NumaOptions(binding.AffinityMode(mode))
        for rank in range(len(gpus)):
            try:
                theirs = binding._get_logical_cpus_to_bind_to(gpu_index=rank, numa_options=options)
            except (RuntimeError, ValueError, ZeroDivisionError):
                with pytest.raises(ValueError, match="NUMA node"):
                    cpus_near(mode, machine.gpus, rank, topology)
            else:
                if theirs:
                    assert cpus_near(mode, machine.gpus, rank, topology) == theirs, (mode, rank)


@pytest.mark.parametrize("numbers", [[], [0], [0, 1, 2], [0, 2, 4], [1, 2, 5, 6, 9]])
def test_ranges_survive_the_way_through_text(numbers: list[int]) -> None:
    """What is written as ranges is read as the same numbers."""
    assert sorted(read_ranges(format_ranks(numbers))) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-x", "0-99999999"])
def test_what_is_no_list_of_numbers_is_said(text: str) -> None:
    """A file with something else in it is an error, and fills no memory."""
    with pytest.raises(ValueError, match="is no list"):
        read_ranges(text)


@pytest.fixture
def numactl(tmp_path: Path) -> str:
    """Give the path of a program that stands in for numactl."""
    program = tmp_path / "bin" / "numactl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


def test_the_words_before_a_worker(tmp_path: Path, numactl: str) -> None:
    """As torchrun: numactl with the CPUs of this rank; GPUs without a rank take their share."""
    machine = Machine(tmp_path)
    environ = {"PATH": os.path.dirname(numactl)}
    found = cpu_binding("exclusive", 3, environ, machine.gpus, machine.topology())
    assert found[1] == (numactl, "--physcpubind=2-3,10-11")
    assert len(found) == 3


def test_what_keeps_workers_from_being_bound(tmp_path: Path, numactl: str) -> None:
    """A missing program, missing GPUs, two ways at once, an unreadable machine: each is said."""
    machine = Machine(tmp_path)
    environ = {"PATH": os.path.dirname(numactl)}
    gpus, topology = machine.gpus, machine.topology()
    with pytest.raises(ValueError, match="--numa-binding node needs the program 'numactl'"):
        cpu_binding("node", 1, {"PATH": "/nowhere"}, gpus, topology)
    with pytest.raises(ValueError, match="there are 4 for 5 workers"):
        cpu_binding("node", 5, environ, gpus, topology)
    with pytest.raises(ValueError, match="there are 0 for 1 workers"):
        cpu_binding("node", 1, environ, [], topology)
    with pytest.raises(ValueError, match="does not tell where all GPUs sit"):
        cpu_binding("node", 1, environ, [gpus[0], None], topology)
    with pytest.raises(ValueError, match="and NVRX_GPUS_PER_NUMA exclude each other"):
        cpu_binding("node", 1, environ | {"NVRX_GPUS_PER_NUMA": "4"}, gpus, topology)
    with pytest.raises(ValueError, match="any: is not one of node, socket"):
        cpu_binding("any", 1, environ, gpus, topology)
    os.unlink(tmp_path / f"bus/pci/devices/{gpus[0]}/numa_node")
    with pytest.raises(ValueError, match=rf"GPU {gpus[0]} of local rank 0: .*No such file"):
        cpu_binding("node", 1, environ, gpus, topology)


def test_a_program_asks_by_torchs_options(
    tmp_path: Path, numactl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LaunchConfig.numa_options` is an object of torch or the name of a mode."""
    machine = Machine(tmp_path)
    monkeypatch.setattr(command, "visible_gpus", lambda _: machine.gpus)
    monkeypatch.setattr(command, "MachineTopology", machine.topology)
    monkeypatch.setenv("PATH", os.path.dirname(numactl))
    mode = types.SimpleNamespace(affinity_mode=types.SimpleNamespace(value="exclusive"))
    for options in ("exclusive", mode):
        config = LaunchConfig(1, 1, 2, FaultToleranceConfig(), numa_options=options)
        found = elastic._binding(config)
        assert found[1] == (numactl, "--physcpubind=2-3,10-11")
    config = LaunchConfig(1, 1, 2, FaultToleranceConfig())
    assert not elastic._binding(config)


def test_machines_with_one_node_say_minus_one(tmp_path: Path) -> None:
    """There is a node 0 all the same."""
    machine = Machine(tmp_path, nodes=(2,), gpus=(-1,))
    assert format_ranks(cpus_near("node", machine.gpus, 0, machine.topology())) == "0-3"
