# SPDX-License-Identifier: Apache-2.0
"""Guess the reason code of a line that no rule knows, from its words alone.

A linear classifier (multinomial logistic regression) over words and pairs of words: each adds its
weights to the codes, and softmax makes probabilities of the sums. One class is "says nothing about
a failure". Its weights are data, `registry/words.json`; `tests/helpers/attribution_train_words.py`
makes them from labelled logs.
"""

from __future__ import annotations

import json
import math
import os
import re
from functools import cache
from itertools import pairwise

__all__ = ["QUIET", "SCALE", "features", "guess"]

SCALE = 10
# A feature beside the words: the writer gave the line a level below error.
QUIET = "<quiet>"
_FILE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "registry", "words.json")
_STEM_LETTERS = 7
_WORD = re.compile(r"[a-z]{2,20}(?![a-z])")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def features(text: str, *, is_quiet: bool) -> set[str]:
    """Return the features of a line: the stems of its words, and of pairs of them.

    Args:
        text: Without its prefixes.
        is_quiet: Its writer gave it a level below error.
    """
    words = [w[:_STEM_LETTERS] for w in _WORD.findall(_CAMEL.sub(" ", text).lower())]
    found = {*words, *(f"{one}_{two}" for one, two in pairwise(words))}
    return found | {QUIET} if is_quiet else found


def guess(text: str, *, is_quiet: bool) -> tuple[str, float]:
    """Return the most probable code of a line, and its probability.

    Args:
        text: Without its prefixes.
        is_quiet: Its writer gave it a level below error.
    """
    codes, biases, weights = _model()
    sums = list(biases)
    for feature in features(text, is_quiet=is_quiet):
        for index, weight in weights.get(feature, ()):
            sums[index] += weight
    powers = [math.exp(value / SCALE) for value in sums]
    best = max(range(len(codes)), key=powers.__getitem__)
    return codes[best], powers[best] / sum(powers)


@cache
def _model() -> tuple[list[str], list[int], dict[str, list[list[int]]]]:
    """Return codes; biases, the last one of lines that say nothing; (code, weight) of words."""
    with open(_FILE, "rb") as file:
        data = json.load(file)
    return data["codes"], data["biases"], data["words"]
