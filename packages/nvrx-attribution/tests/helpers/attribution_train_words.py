# SPDX-License-Identifier: Apache-2.0
"""Learn the weights of words from labelled lines: `python attribution_train_words.py`.

It writes `registry/words.json`. Lines come from the examples of the rules, from
`labelled_lines.tsv` (code, line; no code: it says nothing about a failure), from the logs that
were written without knowing the rules, and from healthy logs. With `--without fa`, a set of
written logs is left out, for a test of what has been learned.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._logs import wording
from nvidia_resiliency_ext.attribution._logs.dialects import LineReader

TESTS = Path(__file__).parents[1]
FILE = TESTS.parent / "src" / "nvidia_resiliency_ext" / "attribution" / "registry" / "words.json"
NOTHING = ""  # the class of lines that say nothing about a failure
FAULT_ROLES = {"root", "either", "cascade"}
LEAST_LINES = 2  # that have a word
SMALLNESS = 3e-5
ROUNDS = 200


def cases(name: str) -> Iterator[dict]:
    """Yield the records of a file of the tests."""
    for line in (TESTS / name).read_text().splitlines():
        yield json.loads(line)


def labelled_lines(without: str) -> Iterator[tuple[str, str]]:
    """Yield (code, line) of all sources."""
    registry = engine.load_registry()
    for rule in registry.rules:
        if rule.code not in registry.codes:
            continue  # the code is read from the line
        is_fault = rule.role in FAULT_ROLES and rule.code != "unknown"
        yield from ((rule.code if is_fault else NOTHING, line) for line in rule.examples)
        yield from ((NOTHING, line) for line in rule.counterexamples)
    for case in cases("reworded_failures.jsonl"):
        lines = [line for line in case["text"].splitlines() if not line.startswith("{")]
        if len(lines) == len(case["codes"]) == 1:
            yield case["codes"][0], lines[0]
    for case in cases("written_failures.jsonl"):
        if without and case["id"].startswith(without):
            continue
        scanner = engine.LogScanner()
        scanner.feed("".join(f"{line}\n" for line in case["lines"]).encode())
        found = scanner.snapshot()  # what rules say
        line = case.get("line") or (found.first_fault and found.first_fault.line)
        if line and (case.get("line") or found.reason_code == case["code"] != "unknown"):
            yield case["code"], case["lines"][line - 1]
            yield from ((NOTHING, other) for other in case["lines"][: line - 1])
    for case in cases("written_healthy.jsonl"):
        if not (without and case["id"].startswith(f"h{without[1:]}")):
            yield from ((NOTHING, line) for line in case["lines"])
    for line in (TESTS / "labelled_lines.tsv").read_text().splitlines():
        code, _, text = line.partition("\t")
        yield code, text
    yield from ((NOTHING, line) for line in (TESTS / "healthy_lines.txt").read_text().splitlines())


def examples(without: str) -> tuple[list[frozenset[str]], list[str]]:
    """Return features and code of each line; lines that say nothing, once each."""
    reader = LineReader()
    found, codes, seen = [], [], set()
    for code, raw in labelled_lines(without):
        line = reader.read(raw.encode())
        words = frozenset(wording.features(line.text, is_quiet=line.is_no_error))
        if code == NOTHING and words in seen:
            continue
        seen.add(words)
        found.append(words)
        codes.append(code)
    return found, codes


def train(without: str = "") -> dict:
    """Return the model as it is stored."""
    lines, labels = examples(without)
    codes = [*sorted(set(labels) - {NOTHING}), NOTHING]
    target = torch.tensor([codes.index(label) for label in labels])
    counts = Counter(word for line in lines for word in line)
    words = sorted(word for word, count in counts.items() if count >= LEAST_LINES)
    numbers = {word: number for number, word in enumerate(words)}
    places = [(i, numbers[w]) for i, line in enumerate(lines) for w in line if w in numbers]
    shape = (len(lines), len(words))
    given = torch.sparse_coo_tensor(
        torch.tensor(places).t(), torch.ones(len(places)), shape, check_invariants=False
    )
    weights = torch.zeros(len(words), len(codes), requires_grad=True)
    biases = torch.zeros(len(codes), requires_grad=True)
    optimizer = torch.optim.Adam([weights, biases], lr=0.05)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        sums = torch.sparse.mm(given, weights) + biases
        loss = torch.nn.functional.cross_entropy(sums, target)
        (loss + SMALLNESS * (weights**2).sum()).backward()
        optimizer.step()
    rounded = (weights.detach() * wording.SCALE).round().int()
    table = {
        word: [[code, value] for code, value in enumerate(row) if value]
        for word, row in zip(words, rounded.tolist(), strict=True)
        if any(row)
    }
    biases = (biases.detach() * wording.SCALE).round().int().tolist()
    return {"codes": codes[:-1], "biases": biases, "words": table}


def text_of(model: dict) -> str:
    """Return the JSON text, a word a line."""
    words = ",\n".join(
        f"{json.dumps(word)}: {json.dumps(row, separators=(',', ':'))}"
        for word, row in model["words"].items()
    )
    head = json.dumps({"codes": model["codes"], "biases": model["biases"]})
    return f'{head[:-1]}, "words": {{\n{words}\n}}}}\n'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--without", default="", help="leave a set of written logs out")
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    options.file.write_text(text_of(train(options.without)))
