# SPDX-License-Identifier: Apache-2.0
"""Print how often the verdict about generated logs and traces is right, one JSON line per figure.

`python packages/nvrx-attribution/bench/score.py [--seeds N] [--first SEED] [-v]`
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import attribution_logs
import attribution_traces

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._traces.analysis import analyze_dumps
from nvidia_resiliency_ext.attribution._traces.dumps import decode_dump
from nvidia_resiliency_ext.attribution._traces.loading import LoadedTraces


def score_logs(seeds: range, *, verbose: bool) -> dict[str, object]:
    """Return the share of right answers about generated logs."""
    counts: Counter[str] = Counter()
    for kind in (*attribution_logs.FAULTS, *attribution_logs.HEALTHY):
        for seed in seeds:
            case = attribution_logs.make_case(kind, seed)
            found = engine.analyze(io.BytesIO(case.text.encode()))
            fault = found.first_fault
            answers = {
                "code": found.reason_code == case.code,
                "action": found.action in case.actions,
            }
            if case.line is not None or case.code == "nccl.timeout":
                if case.rank is not None:
                    answers["rank"] = fault is not None and (
                        fault.rank == case.rank
                        # The kernel names a device of a node; its rank is not in the log.
                        or (fault.rank is None and fault.node == case.node)
                    )
                if case.has_node:
                    answers["node"] = fault is not None and fault.node == case.node
                if case.line is not None:
                    answers["line"] = fault is not None and abs(fault.line - case.line) <= 5
            for name, right in answers.items():
                counts[name] += right
                counts[name + "_of"] += 1
            counts["false_stop"] += found.action == "STOP" and "STOP" not in case.actions
            counts["missed_stop"] += found.action != "STOP" and case.actions == ("STOP",)
            wrong = [name for name, right in answers.items() if not right]
            if wrong and verbose:
                got = (
                    found.reason_code,
                    found.action,
                    fault and (fault.rank, fault.node, fault.line),
                )
                want = (case.code, case.actions, case.rank, case.node, case.line)
                print(kind, seed, wrong, "got", got, "want", want, file=sys.stderr)
    names = ("code", "action", "rank", "node", "line")
    shares = {name: round(counts[name] / counts[name + "_of"], 4) for name in names}
    return {
        "figure": "logs",
        "cases": counts["code_of"],
        **shares,
        "false_stop": counts["false_stop"],
        "missed_stop": counts["missed_stop"],
    }


def score_traces(seeds: range, sizes: list[int]) -> list[dict[str, object]]:
    """Return the share of exact answers about generated traces, by size."""
    figures = []
    for size in sizes:
        right: Counter[str] = Counter()
        cases = 0
        for kind in (*attribution_traces.KINDS, "healthy"):
            for seed in seeds:
                job = attribution_traces.make_job(kind, size, seed)
                dumps = {r: decode_dump(d, r, str(r)) for r, d in job.dumps.items()}
                found = analyze_dumps(LoadedTraces(dumps))
                cases += 1
                right["ranks"] += found.guilty_ranks == job.guilty
                right["kind"] += found.kind == attribution_traces.EXPECTED_KIND[kind]
                right["accused_healthy"] += kind == "healthy" and bool(found.guilty_ranks)
        figures.append(
            {
                "figure": "traces_right",
                "size": size,
                "cases": cases,
                "ranks": round(right["ranks"] / cases, 4),
                "kind": round(right["kind"] / cases, 4),
                "accused_healthy": right["accused_healthy"],
            }
        )
    return figures


def main() -> None:
    """Score both sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="logs per kind (%(default)s)")
    parser.add_argument("--trace-seeds", type=int, default=5, help="traces per kind and size")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--sizes", default="16,64", help="ranks of the traces (%(default)s)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show each wrong answer")
    args = parser.parse_args()
    started = time.perf_counter()
    seeds = range(args.first, args.first + args.seeds)
    figures = [score_logs(seeds, verbose=args.verbose)]
    if args.trace_seeds:
        trace_seeds = range(args.first, args.first + args.trace_seeds)
        figures += score_traces(trace_seeds, [int(size) for size in args.sizes.split(",")])
    for figure in figures:
        load = round(os.getloadavg()[0], 1)
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({**figure, "load": load, "seconds": seconds}))


if __name__ == "__main__":
    main()
