# SPDX-License-Identifier: Apache-2.0
"""Measures rank assignment by `Tree` on one rank: first assignment, and the one after a lost node.

Four layers (all, room of 1024, rack of 128, node of 8 ranks). Case `reserve`: the last nodes are in
reserve and replace lost ranks. Case `shift`: no flags, so nearly every rank gets a new active rank,
the most that a loss can change. The store is a stand-in that has all ranks' states and keys at
hand: what is measured is the rank's own work. Each figure is a JSON line, the median over
repetitions, each in an interpreter of its own. `tree_keys` is what sharing keys through a real
store adds: all ranks' entries are made into the record by one rank, and the record is read by each.

usage: bench_tree.py [--python PY] [--against PY] [--ranks 10000 100000] [--repeats 5]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "nvrx-common" / "bench"))

import _measure

_TREE = r"""
import json, sys, time
from nvidia_resiliency_ext.inprocess.rank_assignment import (
    Layer, LayerFlag, RankAssignmentCtx, Tree
)
from nvidia_resiliency_ext.inprocess.state import State

case, size = sys.argv[1], int(sys.argv[2])
reserve = case == "reserve"
active = size - size // 50 // 8 * 8 if reserve else size
both = LayerFlag.RESERVE | LayerFlag.BACKFILL if reserve else None

def key(name, count):
    return lambda state: f"{name}{state.rank // count}"

layers = [
    Layer(max_ranks=active, key_or_fn="all", flag=both),
    Layer(key_or_fn=key("room", 1024), flag=both),
    Layer(key_or_fn=key("rack", 128), flag=both),
    Layer(min_ranks=8, key_or_fn=key("node", 8), flag=both),
]
states = [State(rank=rank, world_size=size) for rank in range(size)]
keys = [["all", *(layer.key_or_fn(state) for layer in layers[1:])] for state in states]

class Store:
    def send_state(self, state, rank): pass
    def get_states(self, ranks): return [states[rank] for rank in ranks]
    def send_key(self, key, rank): pass
    def get_keys(self, ranks): return [keys[rank] for rank in ranks]

tree = Tree(layers)
ctx = RankAssignmentCtx(State(rank=5000, world_size=size), Store(), set())
times = []
for lost in (set(), {83}, {2405, 2406}):
    ctx.terminated_ranks = lost
    start = time.perf_counter()
    ctx = tree(ctx)
    times.append(time.perf_counter() - start)
assert ctx.state.world_size == size - 16, ctx
assert ctx.state.active_world_size == active - (0 if reserve else 16), ctx
first, again, second = (each * 1e3 for each in times)
print(json.dumps({"first_ms": first, "again_ms": again, "second_ms": second}))
"""
_ROLL = r"""
import json, sys, time
from nvidia_resiliency_ext.inprocess._ranks import gather

size = int(sys.argv[1])
text = "".join(
    gather.entry(rank, ["all", f"room{rank // 1024}", f"rack{rank // 128}", f"node{rank // 8}"])
    for rank in range(size)
)
start = time.perf_counter()
record = gather.compose("k", gather.parse("k", text), range(size))
middle = time.perf_counter()
gather.read("k", record, range(size))
end = time.perf_counter()
print(json.dumps({"list_ms": (middle - start) * 1e3, "list_bytes": len(text),
                  "record_ms": (end - middle) * 1e3, "record_bytes": len(record)}))
"""


def main() -> None:
    """Print one line per size, interpreter and case."""
    parser = _measure.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[10_000, 100_000])
    options = parser.parse_args()
    cases = ("reserve", "shift")
    trees = {f"{case} {n}": [case, str(n)] for case in cases for n in options.ranks}
    rolls = {str(n): [str(n)] for n in options.ranks}
    for name, python in _measure.interpreters(options):
        for label, figures in _measure.medians(python, _TREE, trees, options.repeats).items():
            _measure.show("tree", name, label, _rounded(figures), key="again_ms")
        if name == "python":
            for label, figures in _measure.medians(python, _ROLL, rolls, options.repeats).items():
                _measure.show("tree_keys", name, label, _rounded(figures), key="record_ms")


def _rounded(figures: _measure.Figures) -> _measure.Figures:
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in figures.items()
    }


if __name__ == "__main__":
    main()
