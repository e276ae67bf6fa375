# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a small training cold and from standby, for tests and benchmarks."""

import json
import os
import sys
import time
from pathlib import Path

import ft_conformance as conformance

from nvidia_resiliency_ext.fault_tolerance._workers.command import WorkerCommand
from nvidia_resiliency_ext.fault_tolerance._workers.prewarmed import (
    Begun,
    PrewarmedWorker,
    Ready,
)
from nvidia_resiliency_ext.shared_utils.children import start_child

TRAINING = str(Path(__file__).parent.parent / "programs" / "ft_standby_ddp.py")
TIMEOUT_S = 120.0


def shared_env():
    """Return the environment that all ranks share."""
    names = ("PATH", "HOME", "TMPDIR", "LANG")
    return {name: os.environ[name] for name in names if name in os.environ} | {
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",  # gloo asks for the name of each peer
    }


def rank_env(rank, world):
    """Return the environment of a rank."""
    return {**shared_env(), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}


def training_command(folder):
    """Return the command that trains and writes into a folder."""
    folder.mkdir(exist_ok=True)
    argv = (sys.executable, TRAINING, str(folder), str(folder / "rendezvous"))
    return WorkerCommand(argv, TRAINING, is_module=False, is_python=True)


def train_cold(folder, world):
    """Train with fresh processes; return (start time, results by rank)."""
    command = training_command(folder)
    at = time.monotonic()
    children = [
        start_child(command.argv, env=rank_env(rank, world), die_with_parent=True)
        for rank in range(world)
    ]
    return at, results(folder, children)


def hold(folder, world, *, wait=True):
    """Start standbys for a training; return them and what they said when ready."""
    command = training_command(folder)
    standbys = []
    try:
        for slot in range(world):
            standbys.append(PrewarmedWorker(command, shared_env(), slot))  # noqa: PERF401 - ended below
        ready = [conformance.receive(s, TIMEOUT_S) for s in standbys] if wait else []
        if not all(isinstance(event, Ready) and event.problem is None for event in ready):
            raise AssertionError(ready)  # noqa: TRY301 - the standbys are ended below
    except BaseException:
        for standby in standbys:
            standby.end()
        raise
    return standbys, ready


def train_warm(folder, standbys):
    """Let standbys train; return (time of go, results by rank)."""
    world = len(standbys)
    try:
        at = time.monotonic()
        for rank, standby in enumerate(standbys):
            standby.go(rank_env(rank, world))
        event = [conformance.receive(standby, TIMEOUT_S) for standby in standbys]
        if not all(isinstance(one, Begun) for one in event):
            raise AssertionError(event)  # noqa: TRY301 - likewise
        for standby in standbys:
            standby.release()
        return at, results(folder, [standby.child for standby in standbys])
    except BaseException:
        for standby in standbys:
            standby.end()
        raise


def results(folder, children):
    """Wait for the ranks; return what they wrote, by rank."""
    try:
        ends = [child.wait(TIMEOUT_S) for child in children]
    finally:
        for child in children:
            child.close()
    if any(end is None or end.returncode != 0 for end in ends):
        raise AssertionError(ends)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(children))]
