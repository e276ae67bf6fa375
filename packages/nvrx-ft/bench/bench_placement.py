# SPDX-License-Identifier: Apache-2.0
"""Time to decide who trains, with which rank, and to say so in one line.

    python bench_placement.py [--nodes N] [--repeats N]

Prints one JSON object per case: the median and the largest of wall milliseconds. No process and no
store takes part.
"""

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable

from nvidia_resiliency_ext.fault_tolerance._rendezvous.placement import (
    Placement,
    PlacementRules,
    place,
    summary,
)
from nvidia_resiliency_ext.fault_tolerance._rendezvous.records import Arrival


def nodes(count: int, *, has_infra_ranks: bool) -> list[Arrival]:
    """Return nodes of domains of 18 and array tasks of 4, in random order."""
    made = [
        Arrival(
            node=f"node{index:05}.cluster.local_{10_000 + index}_0",
            addr=f"node{index:05}.cluster.local",
            infra_rank=index if has_infra_ranks else -1,
            domain=f"domain{index // 18:04}",
            group=str(index // 4),
        )
        for index in range(count)
    ]
    random.Random(1).shuffle(made)  # noqa: S311
    return made


def after_a_loss(candidates: list[Arrival], rules: PlacementRules) -> list[Arrival]:
    """Return the nodes of a second round in which every fiftieth is missing."""
    first = place(candidates, rules)
    assert isinstance(first, Placement)
    ranks = {candidate.node: rank for rank, candidate in enumerate(first.active)}
    return [
        dataclasses.replace(candidate, previous_rank=ranks.get(candidate.node))
        for index, candidate in enumerate(candidates)
        if index % 50
    ]


def figure(name: str, count: int, repeats: int, act: Callable[[], object]) -> None:
    """Measure one case and print it."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        taken.append((time.perf_counter() - start) * 1000)
    print(
        json.dumps(
            {
                "figure": f"placement_{name}_ms",
                "nodes": count,
                "median": round(statistics.median(taken), 2),
                "largest": round(max(taken), 2),
                "runs": repeats,
            }
        )
    )


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    count = options.nodes
    needed = count * 3 // 4 // 16 * 16
    plain = PlacementRules(needed, count)
    segments = PlacementRules(needed, count, segment=16)
    groups = PlacementRules(needed, count, segment=16, group_size=4)
    ranked, unranked = nodes(count, has_infra_ranks=True), nodes(count, has_infra_ranks=False)
    kept = after_a_loss(unranked, segments)
    cases: dict[str, Callable[[], object]] = {
        "by_infra_rank": lambda: place(ranked, plain),
        "segments_and_groups": lambda: place(ranked, groups, frozenset({"7"})),
        "keeping_ranks": lambda: place(kept, plain),
        "keeping_ranks_in_segments": lambda: place(kept, segments),
        "too_few": lambda: place(ranked[: needed - 1], groups),
    }
    for name, act in cases.items():
        figure(name, count, options.repeats, act)
    placed = place(kept, segments)
    assert isinstance(placed, Placement)
    figure("summary", count, options.repeats, lambda: summary(placed))


if __name__ == "__main__":
    main()
