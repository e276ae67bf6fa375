# SPDX-License-Identifier: Apache-2.0
"""Print how often the verdict about logs and traces is right, one JSON line per figure.

Generated logs and traces, recorded traces, histories of jobs, and the texts of writers who had not
seen the rules (`tests/*.jsonl`; nothing was learned from `unseen_failures.jsonl`).

`python packages/nvrx-attribution/bench/score.py [--seeds N] [--sizes 16:20,4096:1] [-v]`
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import attribution_logs
import attribution_traces

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._traces.analysis import analyze_dumps
from nvidia_resiliency_ext.attribution._traces.dumps import decode_dump
from nvidia_resiliency_ext.attribution._traces.loading import LoadedTraces

TESTS = Path(__file__).parents[1] / "tests"


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
            counts["stop_of"] += case.actions == ("STOP",)
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
        "missed_stop_share": round(counts["missed_stop"] / max(1, counts["stop_of"]), 4),
    }


def score_traces(
    first: int, sizes: list[tuple[int, int]], *, verbose: bool
) -> Iterator[dict[str, object]]:
    """Yield the share of exact answers about generated traces, for each (size, seeds per kind)."""
    for size, count in sizes:
        right: Counter[str] = Counter()
        cases = 0
        for kind in (*attribution_traces.KINDS, "healthy"):
            for seed in range(first, first + count):
                job = attribution_traces.make_job(kind, size, seed)
                dumps = {r: decode_dump(d, r, str(r)) for r, d in job.dumps.items()}
                found = analyze_dumps(LoadedTraces(dumps))
                cases += 1
                are_right = found.guilty_ranks == job.guilty
                is_kind = found.kind == attribution_traces.EXPECTED_KIND[kind]
                right["ranks"] += are_right
                right["kind"] += is_kind
                right["exact"] += are_right and is_kind
                right["accused_healthy"] += kind == "healthy" and bool(found.guilty_ranks)
                if verbose and not (are_right and is_kind):
                    got = (found.kind, found.guilty_ranks[:16])
                    print(kind, size, seed, "got", got, "want", job.guilty, file=sys.stderr)
        yield {
            "figure": "traces_right",
            "size": size,
            "cases": cases,
            **{name: round(right[name] / cases, 4) for name in ("exact", "ranks", "kind")},
            "accused_healthy": right["accused_healthy"],
        }


def score_recorded() -> dict[str, object]:
    """Return the share of recorded jobs of 16 ranks whose guilty ranks and kind are right."""
    folders = sorted((TESTS / "recorded_traces").iterdir())
    right = 0
    for folder in folders:
        label = json.loads((folder / "label.json").read_text())
        found = engine.fr_report_of(str(folder)) or {}
        right += (found["guilty_ranks"], found["kind"]) == (label["guilty"], label["kind"])
    return {"figure": "traces_recorded", "cases": len(folders), "exact": right / len(folders)}


def score_histories() -> dict[str, object]:
    """Return the share of histories in which each cycle gets the action that its label says."""
    folders = sorted((TESTS / "cases" / "histories").iterdir())
    right = 0
    for folder in folders:
        earlier: list[dict[str, object]] = []
        for cycle, log in enumerate(sorted(folder.glob("*.log"))):
            found = engine.analyze(log, history=earlier, job_id="j", cycle_id=cycle)
            earlier.append(found.to_dict())
        actions = [verdict["action"] for verdict in earlier]
        right += actions == json.loads((folder / "label.json").read_text())
    return {"figure": "histories", "cases": len(folders), "exact": right / len(folders)}


def score_texts() -> Iterator[dict[str, object]]:
    """Yield the share of right answers about logs of writers who had not seen the rules."""
    for name in ("written_failures", "unseen_failures"):
        cases = list(map(json.loads, (TESTS / f"{name}.jsonl").read_text().splitlines()))
        counts: Counter[str] = Counter()
        for case in cases:
            found = engine.analyze(io.BytesIO(("\n".join(case["lines"]) + "\n").encode()))
            rank = found.first_fault and found.first_fault.rank
            counts["code"] += found.reason_code == case["code"]
            counts["action"] += found.action == case["action"]
            counts["rank"] += case["rank"] in {None, rank}
            counts["false_stop"] += (case["action"], found.action) == ("RESTART", "STOP")
        shares = {key: round(counts[key] / len(cases), 3) for key in ("code", "action", "rank")}
        false_stop = counts["false_stop"]
        yield {"figure": name, "cases": len(cases), **shares, "false_stop": false_stop}


def main() -> None:
    """Score all sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="logs per kind (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument(
        "--sizes",
        default="16:5,64:5,256:3,1024:1,4096:1",
        help="ranks of the traces and seeds for each kind (%(default)s); empty: none",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show each wrong answer")
    args = parser.parse_args()
    started = time.perf_counter()
    seeds = range(args.first, args.first + args.seeds)
    sizes = [text.split(":") for text in filter(None, args.sizes.split(","))]
    pairs = [(int(size), int(count)) for size, count in sizes]
    figures = score_traces(args.first, pairs, verbose=args.verbose)
    logs = [score_logs(seeds, verbose=args.verbose)] if seeds else []
    kept = (score() for score in (score_recorded, score_histories))
    for figure in itertools.chain(logs, figures, kept, score_texts()):
        load = round(os.getloadavg()[0], 1)
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({**figure, "load": load, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
