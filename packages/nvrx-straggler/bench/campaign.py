# SPDX-License-Identifier: Apache-2.0
"""How many slow ranks are named: generated jobs with known slow ranks, scored as a report does.

Each trial draws medians of kernels for all ranks: kernels that all ranks run, kernels that only
some of them run, noise of samples, differences between GPUs. It slows some ranks, silences one, and
compares whom a report names with whom it slowed. The threshold is one number for all jobs, or what
`Report.suggest_threshold` finds in each report. With `--past`, ranks become slow after 20 windows,
and the individual score is compared with the threshold. Prints one JSON line for each amount of
slowdown, the first for healthy jobs.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass

import numpy as np

from nvidia_resiliency_ext.attribution.straggler import Report
from nvidia_resiliency_ext.attribution.straggler._scores.scoring import (
    ABSTAINS,
    MISSING,
    ScoringOptions,
    gpu_score,
    ratios,
    reference_of_ranks,
)
from nvidia_resiliency_ext.attribution.straggler._scores.views import RankScores

COMMON_KERNELS = 40
OTHER_KERNELS = 20
SAMPLES = 100
NOISE = 0.03
EARLIER_WINDOWS = 20


@dataclass(frozen=True)
class Job:
    """What kind of jobs are generated, and how ranks are named.

    Attributes:
        largest: Most ranks of a job.
        least: Fewest ranks of a job.
        spread: Standard deviation of the speed of healthy GPUs, as a part of it.
        scope: `reference_scope` of the detector.
        threshold: GPU score below which a rank is named; None: as the report suggests.
        past: Compare ranks with their own past, in which none was slow.
    """

    largest: int
    least: int = 8
    spread: float = 0.005
    scope: str = "all"
    threshold: float | None = None
    past: bool = False


def window(
    generator: np.random.Generator, ranks: int, slow: np.ndarray, slowdown: float, job: Job
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return medians `[ranks, kernels]`, weights and the reference of each median.

    One rank is silent, some kernels are missing.
    """
    kernels = COMMON_KERNELS + OTHER_KERNELS
    base = generator.lognormal(3.0, 1.5, kernels)
    # The median of n noisy samples varies by about 1.25 / sqrt(n) of one sample's noise.
    noise = NOISE * 1.25 / np.sqrt(SAMPLES)
    medians = base * (1 + generator.normal(0, noise, (ranks, kernels)))
    speed = 1 + generator.normal(0, job.spread, (ranks, 1))
    medians *= speed
    medians[slow] *= 1 + slowdown
    weights = medians * SAMPLES
    lacks = generator.random((ranks, OTHER_KERNELS)) < 0.5
    medians[:, COMMON_KERNELS:][lacks] = MISSING
    medians[generator.integers(ranks)] = ABSTAINS
    if not job.past:
        reference = reference_of_ranks(medians, ScoringOptions(reference_scope=job.scope))
        return medians, weights, np.broadcast_to(reference, medians.shape)
    best = np.where(medians > 0, medians, np.inf)
    for _ in range(EARLIER_WINDOWS):
        earlier = base * (1 + generator.normal(0, noise, (ranks, kernels))) * speed
        best = np.minimum(best, earlier)
    return medians, weights, best


def named(medians: np.ndarray, weights: np.ndarray, references: np.ndarray, job: Job) -> set[int]:
    """Return the ranks that a report of these medians names."""
    times = np.where(np.isfinite(medians) & (medians > 0), medians, np.nan)
    scores = [
        gpu_score(ratios(reference, own), weight)
        for reference, own, weight in zip(references, times, weights, strict=True)
    ]
    report = Report(RankScores(np.array(scores), 0), {}, {}, {}, {}, {}, {}, 0.0, True)
    threshold = report.suggest_threshold() if job.threshold is None else job.threshold
    # The same scores, whatever they are compared with.
    found = report.identify_stragglers(gpu_rel_threshold=threshold)
    return {item.rank for item in found["straggler_gpus_relative"]}


def campaign(seed: int, trials: int, slowdown: float, job: Job) -> dict[str, float]:
    """Return precision, recall and how many healthy jobs had a rank named."""
    generator = np.random.default_rng(seed)
    right = wrong = missed = falsely_named = 0
    for _ in range(trials):
        ranks = round(2 ** generator.uniform(np.log2(job.least), np.log2(job.largest)))
        count = int(min(ranks // 4, 2 ** generator.uniform(0, 6.1), 64)) if slowdown else 0
        slow = generator.choice(ranks, count, replace=False)
        medians, weights, references = window(generator, ranks, slow, slowdown, job)
        silent = int(np.flatnonzero(~np.isfinite(medians).any(axis=1))[0])
        truth = set(slow.tolist()) - {silent}
        found = named(medians, weights, references, job)
        right += len(found & truth)
        wrong += len(found - truth)
        missed += len(truth - found)
        falsely_named += bool(found) and not truth
    return {
        "precision": round(right / max(right + wrong, 1), 4),
        "recall": round(right / max(right + missed, 1), 4),
        "healthy_jobs_named": falsely_named,
        "false_names": wrong,
    }


def main() -> None:
    """Run the trials and print a line for each slowdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--healthy", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4096, help="largest job")
    parser.add_argument("--least", type=int, default=8, help="smallest job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threshold", type=float, help="of all jobs; default: as suggested")
    parser.add_argument("--spread", type=float, default=0.005, help="of healthy GPUs")
    parser.add_argument("--scope", choices=["all", "present"], default="all")
    parser.add_argument("--past", action="store_true", help="compare ranks with their own past")
    options = parser.parse_args()
    job = Job(
        largest=options.ranks,
        least=options.least,
        spread=options.spread,
        scope=options.scope,
        threshold=options.threshold,
        past=options.past,
    )
    for slowdown in (0.0, 0.03, 0.05, 0.10, 0.20, 0.35, 0.50):
        trials = options.trials if slowdown else options.healthy
        found = campaign(options.seed, trials, slowdown, job)
        print(json.dumps({"slowdown": slowdown, "threshold": job.threshold or "suggested",
                          "trials": trials, **found, "load": os.getloadavg()[0]}),
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
