# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints of two hosts that keep each other's copies, one of which is cut off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_jobs import wait_until
from hosts import HostProcess, Network

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).resolve().parent / "programs" / "local_checkpoint_rank.py"
READY_WITHIN_S = 120.0
ENDS_WITHIN_S = 200


def start(network: Network, folder: Path, action: str) -> list[tuple[HostProcess, Path]]:
    """Start a rank on each host; return them with the files that they print to."""
    started = []
    for rank, host in enumerate(network):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("NVRX", "TORCH", "SLURM"))}
        env |= {"MASTER_ADDR": network[0].address, "MASTER_PORT": "7001", "WORLD_SIZE": "2"}
        env |= {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        log = folder / f"{action}{rank}.log"
        command = [sys.executable, PROGRAM, folder, folder / f"node{rank}", action]
        process = host.start(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        started.append((process, log))
    return started


def test_a_host_cut_off_during_a_save_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    """A lost peer fails the save with its name within the timeouts; the one before it loads."""
    with Network(2, keep=[tmp_path]) as network:
        saving = start(network, tmp_path, "save")
        ready = [tmp_path / f"ready{rank}" for rank in range(2)]
        wait_until(
            lambda: all(path.exists() for path in ready),
            lambda: " ".join(log.read_text() for _, log in saving),
            READY_WITHIN_S,
        )
        network[1].cut()
        (tmp_path / "go").touch()
        for rank, (process, log) in enumerate(saving):
            process.wait(ENDS_WITHIN_S)
            [line] = [x for x in log.read_text().splitlines() if x.startswith("FAILED")]
            assert line.startswith("FAILED CheckpointingException"), line
            assert f"rank {1 - rank} at {network[1 - rank].address}" in line, line
        network[1].mend()
        for process, log in start(network, tmp_path, "load"):
            assert process.wait(ENDS_WITHIN_S) == 0, log.read_text()
            assert "LOADED 1 1 True" in log.read_text()
