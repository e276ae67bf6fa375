# SPDX-License-Identifier: Apache-2.0
"""Run one rank's save, in the trainer or in a worker process; no torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.checkpointing._errors import CheckpointWriteError
from nvidia_resiliency_ext.checkpointing._shard.directory import (
    RankDirectory,
    ShardInProgress,
    ShardName,
)
from nvidia_resiliency_ext.checkpointing._shard.peer import Peer, PeerError, PeerTarget
from nvidia_resiliency_ext.checkpointing._shard.write import ShardContent, write_content


@dataclass(frozen=True)
class SaveJob:
    """Description of a save without the bytes of the tensors; can be pickled.

    Attributes:
        root: Directory of all sessions.
        session_id: The session.
        rank: The rank that saves.
        content: The shard.
        peers: The ranks that get a copy.
    """

    root: str
    session_id: str
    rank: int
    content: ShardContent
    peers: tuple[Peer, ...] = ()


def run_save_job(job: SaveJob, storages: Sequence[Any]) -> str:
    """Write a shard and its copies; give the shard its name when all of them are durable.

    A failure leaves a note in the place of the shard, so that the trainer can say what happened
    when this ran in another process.

    Args:
        job: What to save.
        storages: The bytes of the storages.

    Returns:
        What went wrong; empty when the shard is there.
    """
    identity = job.content.identity
    directory = RankDirectory(job.root, job.session_id, job.rank)
    try:
        shard = directory.create(identity.iteration, identity.owner)
    except OSError as error:
        return str(error)
    try:
        _write_everywhere(job, storages, shard)
    except OSError as error:
        problem = error
        if not isinstance(error, (CheckpointWriteError, PeerError)):
            nbytes = shard.written_bytes
            problem = CheckpointWriteError.from_os(error, shard.path, nbytes, "write")
        shard.discard(note=str(problem))
        return str(problem)
    except BaseException as error:
        # Not ours to evaluate, but nothing half-written may keep its lock or its space.
        shard.discard(note=repr(error))
        raise
    return ""


# For the queue: a worker process without torch can run it.
run_save_job.takes_bytes = True  # type: ignore[attr-defined]


def _write_everywhere(job: SaveJob, storages: Sequence[Any], shard: ShardInProgress) -> None:
    identity = job.content.identity
    name = ShardName(identity.iteration, identity.owner)
    targets: list[PeerTarget] = []
    try:
        for peer in job.peers:
            targets.append(PeerTarget(peer, name))  # noqa: PERF401 - all made so far are closed
        write_content(job.content, storages, shard.write, targets)
        for target in targets:
            target.finish()
    finally:
        for target in targets:
            target.close()
    shard.publish()
