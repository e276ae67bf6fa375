# SPDX-License-Identifier: Apache-2.0
"""Record the flight recorder of a real 16-rank gloo job in which known ranks go wrong.

`python attribution_record_traces.py FOLDER [SCENARIO...]` writes `_dump_RANK.json` and `label.json`
to FOLDER/SCENARIO. torch is imported once; the ranks are forked.
"""

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "100"

import torch
import torch.distributed as dist

RANKS = 16
STEPS = 4
FAULT_STEP = 2
SCENARIOS = {
    "two_hosts": ("host", [12, 14]),
    "one_host": ("host", [9]),
    "skipped": ("desync", [5]),
    "wrong_type": ("mismatch", [10]),
    "healthy": ("none", []),
}


def main() -> None:
    folder = Path(sys.argv[1])
    for scenario in sys.argv[2:] or SCENARIOS:
        target = folder / scenario
        target.mkdir(parents=True, exist_ok=True)
        kind, guilty = SCENARIOS[scenario]
        (target / "label.json").write_text(json.dumps({"kind": kind, "guilty": guilty}) + "\n")
        store = str(target / "store")
        children = []
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                work(scenario, rank, store, target)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        os.unlink(store)


def work(scenario: str, rank: int, store: str, target: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=300),
    )
    tensor = [list(range(first, first + 4)) for first in range(0, RANKS, 4)]
    data = [list(range(first, RANKS, 4)) for first in range(4)]
    own = {}
    for name, layout in (("TENSOR", tensor), ("DATA", data)):
        for members in layout:
            group = dist.new_group(members, group_desc=name)
            if rank in members:
                own[name] = group
    dist.barrier()
    _, guilty = SCENARIOS[scenario]
    threading.Thread(target=dump_later, args=(rank, target), daemon=True).start()
    try:
        train(scenario, rank, own, rank in guilty)
    except RuntimeError as error:
        print(rank, error)
    time.sleep(100)


def train(scenario: str, rank: int, own: dict, is_guilty: bool) -> None:
    for step in range(STEPS):
        bad = is_guilty and step == FAULT_STEP
        if bad and scenario in {"two_hosts", "one_host"}:
            time.sleep(100)
        value = torch.ones(64)
        dist.all_reduce(value, group=own["TENSOR"])
        if not (bad and scenario == "skipped"):
            dist.all_reduce(torch.ones(256), group=own["TENSOR"])
        kind = torch.float64 if bad and scenario == "wrong_type" else torch.float32
        dist.all_reduce(torch.ones(1024, dtype=kind), group=own["DATA"])
        dist.all_reduce(torch.ones(1))


def dump_later(rank: int, target: Path) -> None:
    time.sleep(float(os.environ.get("DUMP_AFTER_S", "20")))
    from torch._C import _distributed_c10d as recorder

    text = recorder._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
    data = text if isinstance(text, bytes) else text.encode()
    (target / f"_dump_{rank}.json").write_bytes(data)
    os._exit(0)


if __name__ == "__main__":
    main()
