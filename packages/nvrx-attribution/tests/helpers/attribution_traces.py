# SPDX-License-Identifier: Apache-2.0
"""Make flight-recorder dumps of a simulated training job in which one known thing went wrong.

Every rank has a program (tensor, pipeline and data parallel operations of several steps), a host
that enqueues it up to a depth ahead, and a device that ends operations in order; a collective ends
when all members' devices are at it with the same signature. The fault stops, changes or leaves out
something, and the job runs until nothing moves. Nothing here knows the analysis.
"""

from __future__ import annotations

import json
import pickle
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

KINDS = (
    "host_stuck",
    "device_stuck",
    "two_hosts",
    "p2p_host",
    "wrong_op",
    "wrong_size",
    "skipped_op",
    "missing_dump",
)
EXPECTED_KIND = {
    "host_stuck": "host",
    "device_stuck": "device",
    "two_hosts": "host",
    "p2p_host": "host",
    "wrong_op": "mismatch",
    "wrong_size": "mismatch",
    "skipped_op": "desync",
    "missing_dump": "missing",
    "healthy": "none",
}


@dataclass
class Step:
    """One operation of a program: group, name, element count; peers for a transfer."""

    group: int
    name: str
    count: int
    peers: tuple[int, int] | None = None


@dataclass
class Rank:
    """State of one simulated rank."""

    rank: int
    program: list[Step]
    enqueued: int = 0
    done: int = 0
    host_stop: int | None = None
    device_stop: int | None = None
    is_frozen_late: bool = False
    arrived: bool = False
    seqs: dict[int, int] = field(default_factory=dict)
    p2p_seqs: dict[int, int] = field(default_factory=dict)
    entries: list[dict] = field(default_factory=list)


@dataclass
class Job:
    """Generated dumps and who is to blame."""

    kind: str
    guilty: list[int]
    dumps: dict[int, dict]


def layout(size: int, rng: random.Random) -> tuple[int, int, int]:
    """Return sizes of the tensor, pipeline and data parallel groups."""
    tensor = rng.choice([t for t in (2, 4, 8) if size % t == 0 and size // t >= 4])
    pipeline = rng.choice([p for p in (2, 4) if size % (tensor * p) == 0 and size // tensor > p])
    return tensor, pipeline, size // (tensor * pipeline)


def groups_of(size: int, tensor: int, pipeline: int) -> list[tuple[str, list[int]]]:
    """Return (description, members) of each group; the world is the first."""
    data = size // (tensor * pipeline)
    found = [("default_pg", list(range(size)))]
    found += [
        ("TENSOR_MODEL_PARALLEL_GROUP", list(range(first, first + tensor)))
        for first in range(0, size, tensor)
    ]
    stride = tensor * data
    found += [
        ("PIPELINE_MODEL_PARALLEL_GROUP", [first + stage * stride for stage in range(pipeline)])
        for first in range(stride)
    ]
    found += [
        ("DATA_PARALLEL_GROUP", [stage * stride + replica * tensor + t for replica in range(data)])
        for stage in range(pipeline)
        for t in range(tensor)
    ]
    return found


def make_job(kind: str, size: int, seed: int, *, steps: int = 4) -> Job:
    """Return the dumps of a job of `size` ranks with one fault, reproducible by its seed."""
    rng = random.Random(f"{kind} {size} {seed}")
    tensor, pipeline, data = layout(size, rng)
    groups = groups_of(size, tensor, pipeline)
    mine: dict[int, list[int]] = {rank: [] for rank in range(size)}
    for index, (_, members) in enumerate(groups):
        for rank in members:
            mine[rank].append(index)
    layers = rng.randint(1, 3)
    hidden = rng.choice([1024, 2048, 4096])
    ranks = [
        Rank(rank, program(rank, mine[rank], groups, steps, layers, hidden)) for rank in range(size)
    ]
    guilty = inject(kind, ranks, groups, rng)
    run(ranks, groups, depth=rng.randint(4, 12), tensor=tensor * data)
    only_active = rng.random() < 0.4
    ring = rng.choice([10_000, 60, 40])
    dumps = {
        rank.rank: dump(rank, mine[rank.rank], groups, rng, only_active=only_active, ring=ring)
        for rank in ranks
    }
    if kind == "missing_dump":
        for rank in guilty:
            del dumps[rank]
    return Job(kind, sorted(guilty), dumps)


def program(rank, own, groups, steps, layers, hidden) -> list[Step]:
    """Return what one rank calls in all steps."""
    world, tensor, pipe, data = own
    members = groups[pipe][1]
    stage = members.index(rank)
    last = len(members) - 1
    found = [Step(world, "all_reduce", 1)]
    for step in range(steps):
        if stage > 0:
            found.append(Step(pipe, "recv", hidden, (stage - 1, stage)))
        for layer in range(layers):
            found.append(Step(tensor, "_all_gather_base", hidden * (layer + 1)))
            found.append(Step(tensor, "all_reduce", hidden * 2 + layer))
        if stage < last:
            found.append(Step(pipe, "send", hidden, (stage, stage + 1)))
            found.append(Step(pipe, "recv", hidden, (stage + 1, stage)))
        found.append(Step(tensor, "_reduce_scatter_base", hidden * 4))
        if stage > 0:
            found.append(Step(pipe, "send", hidden, (stage, stage - 1)))
        found.append(Step(data, "_reduce_scatter_base", hidden * 8))
        found.append(Step(data, "_all_gather_base", hidden * 9))
        found.append(Step(world, "all_reduce", 1 + step % 2))
    return found


def inject(kind, ranks, groups, rng) -> list[int]:
    """Put the fault into the programs; return the ranks to blame."""
    victim = rng.choice(ranks)
    length = len(victim.program)
    at = rng.randrange(length // 3, length - 2)
    if kind == "healthy":
        return []
    if kind in {"host_stuck", "missing_dump"}:
        victim.host_stop = at
    elif kind == "device_stuck":
        collectives = [i for i in range(length // 3, length - 4) if victim.program[i].peers is None]
        victim.device_stop = rng.choice(collectives)
        victim.is_frozen_late = rng.random() < 0.7
    elif kind == "two_hosts":
        # Of one pipeline stage, before the same collective: neither stands behind the other.
        stage = [rank for rank in ranks if [s.name for s in rank.program] == names(victim)]
        peers = [rank for rank in stage if rank is not victim and not shares(rank, victim, groups)]
        other = rng.choice(peers or [rank for rank in stage if rank is not victim])
        places = [i for i in range(length // 3, length - 2) if victim.program[i].peers is None]
        victim.host_stop = other.host_stop = rng.choice(places)
        return [victim.rank, other.rank]
    elif kind == "p2p_host":
        transfers = [i for i, step in enumerate(victim.program) if step.peers and i > length // 3]
        victim.host_stop = rng.choice(transfers)
    else:
        places = [
            i
            for i in range(length // 3, length - 3)
            if victim.program[i].peers is None and len(groups[victim.program[i].group][1]) > 2
        ]
        if not places:
            return inject(kind, ranks, groups, rng)
        place = rng.choice(places)
        step = victim.program[place]
        if kind == "wrong_op":
            other_name = "broadcast" if step.name != "broadcast" else "all_reduce"
            victim.program[place] = Step(step.group, other_name, step.count)
        elif kind == "wrong_size":
            victim.program[place] = Step(step.group, step.name, step.count + rng.randint(1, 99))
        else:
            del victim.program[place]
    return [victim.rank]


def names(rank: Rank) -> list[str]:
    """Return the names of what a rank calls."""
    return [step.name for step in rank.program]


def shares(one: Rank, other: Rank, groups) -> bool:
    """Tell whether two ranks are in one tensor parallel group."""
    return any(
        desc.startswith("TENSOR") and {one.rank, other.rank} <= set(members)
        for desc, members in groups
    )


def run(ranks, groups, depth, tensor) -> None:
    """Let hosts and devices go on until nothing moves."""
    at: dict[tuple, list[Rank]] = {}
    queue = deque(ranks)
    while queue:
        rank = queue.popleft()
        enqueue(rank, depth)
        if rank.arrived or rank.done >= rank.enqueued:
            continue
        if rank.device_stop is not None and rank.done == rank.device_stop:
            if not rank.is_frozen_late:
                rank.arrived = True
                continue
        elif rank.device_stop is not None and rank.done > rank.device_stop:
            continue
        step, entry = rank.program[rank.done], rank.entries[rank.done]
        entry["state"] = "started"
        entry["time_discovered_started_ns"] = entry["time_created_ns"] + 1000
        if step.peers:
            key = (step.group, "p2p", step.peers, entry["pair"])
            needed = 2
        else:
            key = (step.group, entry["collective_seq_id"])
            needed = len(groups[step.group][1])
        waiting = at.setdefault(key, [])
        waiting.append(rank)
        rank.arrived = True
        if len(waiting) < needed:
            continue
        signatures = {
            ("p2p" if r.program[r.done].peers else r.program[r.done].name, r.program[r.done].count)
            for r in waiting
        }
        if len(signatures) > 1:
            continue
        del at[key]
        for other in waiting:
            finish(other)
            queue.append(other)


def enqueue(rank: Rank, depth: int) -> None:
    """Let the host call operations, at most `depth` ahead of the device."""
    while rank.enqueued < len(rank.program) and rank.enqueued - rank.done < depth:
        if rank.host_stop is not None and rank.enqueued >= rank.host_stop:
            return
        step = rank.program[rank.enqueued]
        seqs = rank.p2p_seqs if step.peers else rank.seqs
        seqs[step.group] = seqs.get(step.group, 0) + 1
        pair = (step.group, step.peers, step.name)
        rank.seqs[pair] = rank.seqs.get(pair, 0) + 1
        rank.entries.append(
            {
                "record_id": rank.enqueued,
                "group": step.group,
                "collective_seq_id": rank.seqs.get(step.group, 0),
                "p2p_seq_id": rank.p2p_seqs.get(step.group, 0),
                "pair": rank.seqs[pair],
                "state": "scheduled",
                "time_created_ns": 10**18 + rank.enqueued * 10**6 + rank.rank,
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
            }
        )
        rank.enqueued += 1


def finish(rank: Rank) -> None:
    """End the operation at the head of the device's queue."""
    entry = rank.entries[rank.done]
    rank.arrived = False
    if rank.device_stop is not None and rank.done == rank.device_stop:
        # The device died in it: peers have ended it, this rank never does.
        rank.done += 1
        rank.arrived = True
        return
    entry["state"] = "completed"
    entry["time_discovered_completed_ns"] = entry["time_created_ns"] + 2000
    rank.done += 1


def dump(rank, own, groups, rng, *, only_active, ring) -> dict:
    """Return the recorder's content of one rank."""
    entries = []
    status = {}
    for local, index in enumerate(own):
        indices = [i for i, e in enumerate(rank.entries) if e["group"] == index]
        numbers = {}
        for key, kept in (
            ("last_enqueued_collective", indices),
            (
                "last_started_collective",
                [i for i in indices if rank.entries[i]["state"] != "scheduled"],
            ),
            (
                "last_completed_collective",
                [i for i in indices if rank.entries[i]["state"] == "completed"],
            ),
        ):
            # Transfers count here, too: the numbers of a pipeline group mix both.
            numbers[key] = (
                rank.entries[kept[-1]]["collective_seq_id"] + rank.entries[kept[-1]]["p2p_seq_id"]
                if kept
                else -1
            )
        status[str(local)] = numbers
    for position, entry in enumerate(rank.entries):
        if only_active and entry["state"] == "completed":
            continue
        step = rank.program[position]
        name = f"nccl:{step.name}"
        if step.peers:
            me, other = step.peers if step.name == "send" else step.peers[::-1]
            name = f"nccl:{step.name} {me}{'->' if step.name == 'send' else '<-'}{other}"
        desc, _ = groups[step.group]
        entries.append(
            {
                "record_id": entry["record_id"],
                "pg_id": own.index(step.group),
                "process_group": (str(step.group), desc),
                "collective_seq_id": entry["collective_seq_id"],
                "p2p_seq_id": entry["p2p_seq_id"],
                "op_id": position,
                "profiling_name": name,
                "time_created_ns": entry["time_created_ns"],
                "duration_ms": 0.1,
                "input_sizes": [[step.count]],
                "output_sizes": [[step.count]],
                "input_dtypes": ["BFloat16"],
                "output_dtypes": ["BFloat16"],
                "state": entry["state"],
                "time_discovered_started_ns": entry["time_discovered_started_ns"],
                "time_discovered_completed_ns": entry["time_discovered_completed_ns"],
                "retired": entry["state"] == "completed",
                "timeout_ms": 600000,
                "is_p2p": step.peers is not None,
                "thread_id": "1",
                "thread_name": "pt_main_thread",
                "frames": [
                    {"name": "train_step", "filename": "/app/train.py", "line": 10 + position}
                ],
            }
        )
    return {
        "version": "2.10",
        "nccl_version": "2.27.3",
        "pg_config": {
            str(index): {
                "name": str(index),
                "desc": groups[index][0],
                "ranks": str(groups[index][1]),
            }
            for index in own
        },
        "pg_status": status,
        "entries": entries[-ring:],
        "host_name": f"node{rank.rank // 8:04d}",
    }


def write(job: Job, folder: Path, *, as_json: bool = False) -> Path:
    """Write the dumps as files of a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, content in job.dumps.items():
        if as_json:
            (folder / f"_dump_{rank}.json").write_text(json.dumps(content))
        else:
            (folder / f"_dump_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    return folder
