# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM, Megatron-Bridge and NeMo import and call works as they write it."""

import json
import os
import subprocess
import sys

import pytest
from callers import ROWS

# Forks have torch from the one import, and of ours what their own rows import.
RUN_ALL = """
import json, os, sys, traceback, warnings
warnings.simplefilter("ignore")
import torch.distributed
def run(codes):
    for code in codes:
        try:
            exec(compile(code, "<row>", "exec"), {"__name__": "row"})
            yield None
        except BaseException:
            yield traceback.format_exc()[-2000:]  # at most what a pipe takes at once
children = []
for name, codes in json.load(sys.stdin).items():
    if pid := os.fork():
        children.append(pid)
        continue
    for answer in run(codes):
        os.write(1, json.dumps([name, answer]).encode() + b"\\n")  # at once, also if unbuffered
    sys.exit()
for pid in children:
    os.waitpid(pid, 0)
"""


@pytest.mark.timeout(300)
def test_callers_code_runs():
    """Each row of the table runs without an error, in a process of its distribution's rows."""
    rows = sorted(ROWS, key=lambda row: row.needs)
    codes = {}
    for row in rows:
        codes.setdefault(row.needs, []).append(row.code)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NVRX_", "FT_", "SLURM"))
    }
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps(codes),
        capture_output=True, text=True, timeout=290, env=environment, check=False,
    )  # fmt: skip
    lines = [line for line in result.stdout.splitlines() if line.startswith('["nvrx-')]
    answers = sorted((json.loads(line) for line in lines), key=lambda answer: answer[0])
    said = result.stdout + result.stderr
    assert [name for name, _ in answers] == [row.needs for row in rows], said
    failed = [
        f"{row.caller}, {row.where}:\n{answer}"
        for row, (_, answer) in zip(rows, answers, strict=True)
        if answer is not None
    ]
    assert not failed, "\n".join(failed)
