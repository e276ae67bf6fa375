# SPDX-License-Identifier: Apache-2.0
"""How many slow ranks are named: generated jobs with known slow ranks, scored as a report does.

Each trial draws medians of kernels for all ranks with noise, slows some ranks, drops kernels from
ranks, silences one rank, and compares whom the scores name with whom it slowed. One threshold, as
a job has one, serves all slowdowns. Prints one JSON line for each amount of slowdown, and one for
healthy jobs.
"""

from __future__ import annotations

import argparse
import json
import os

import numpy as np

from nvidia_resiliency_ext.attribution.straggler._scores.scoring import (
    ABSTAINS,
    ScoringOptions,
    gpu_score,
    ratios,
    reference_of_ranks,
)

KERNELS = 60
SAMPLES = 100
NOISE = 0.03
MISSING_PART = 0.02


def window(
    generator: np.random.Generator, ranks: int, slow: np.ndarray, slowdown: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return medians `[ranks, kernels]` and weights; one rank is silent, some kernels missing."""
    base = generator.lognormal(3.0, 1.5, KERNELS)
    # The median of n noisy samples varies by about 1.25 / sqrt(n) of one sample's noise.
    spread = NOISE * 1.25 / np.sqrt(SAMPLES)
    medians = base * (1 + np.abs(generator.normal(0, spread, (ranks, KERNELS))))
    medians[slow] *= 1 + slowdown
    weights = medians * SAMPLES
    medians[generator.random((ranks, KERNELS)) < MISSING_PART] = ABSTAINS
    medians[generator.integers(ranks)] = ABSTAINS
    return medians, weights


def named(medians: np.ndarray, weights: np.ndarray, threshold: float) -> set[int]:
    """Return the ranks whose relative score is below the threshold."""
    reference = reference_of_ranks(medians, ScoringOptions(reference_scope="present"))
    found = set()
    for rank, own in enumerate(medians):
        times = np.where(np.isfinite(own), own, np.nan)
        if gpu_score(ratios(reference, times), weights[rank]) < threshold:
            found.add(rank)
    return found


def campaign(
    seed: int, trials: int, slowdown: float, largest: int, threshold: float
) -> dict[str, float]:
    """Return precision, recall and how many healthy jobs had a rank named."""
    generator = np.random.default_rng(seed)
    right = wrong = missed = falsely_named = 0
    for _ in range(trials):
        ranks = int(2 ** generator.uniform(3, np.log2(largest)))
        count = int(min(ranks // 4, 2 ** generator.uniform(0, 6))) if slowdown else 0
        slow = generator.choice(ranks, count, replace=False)
        medians, weights = window(generator, ranks, slow, slowdown)
        silent = int(np.flatnonzero(~np.isfinite(medians).any(axis=1))[0])
        truth = set(slow.tolist()) - {silent}
        found = named(medians, weights, threshold)
        right += len(found & truth)
        wrong += len(found - truth)
        missed += len(truth - found)
        falsely_named += bool(found) and not truth
    return {
        "precision": right / max(right + wrong, 1),
        "recall": right / max(right + missed, 1),
        "healthy_jobs_named": falsely_named,
        "false_names": wrong,
    }


def main() -> None:
    """Run the trials and print a line for each slowdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--healthy", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4096, help="largest job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threshold", type=float, default=0.93, help="of the relative GPU score")
    options = parser.parse_args()
    for slowdown in (0.0, 0.03, 0.05, 0.10, 0.20, 0.35, 0.50):
        trials = options.trials if slowdown else options.healthy
        largest = options.ranks if slowdown else 512
        found = campaign(options.seed, trials, slowdown, largest, options.threshold)
        line = {"slowdown": slowdown, "threshold": options.threshold, "trials": trials, **found,
                "load": os.getloadavg()[0]}  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
