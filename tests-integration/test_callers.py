# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM, Megatron-Bridge and NeMo import and call works as they write it."""

import json
import os
import subprocess
import sys

import pytest
from callers import ROWS

RUN_ALL = """
import json, sys, traceback, warnings
warnings.simplefilter("ignore")
for code in json.load(sys.stdin):
    try:
        exec(compile(code, "<row>", "exec"), {"__name__": "row"})
        print(json.dumps(None))
    except BaseException:
        print(json.dumps(traceback.format_exc()))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("distribution", sorted({row.needs for row in ROWS}))
def test_callers_code_runs(distribution):
    """Each row of the table runs without an error, in an interpreter of its distribution's rows."""
    rows = [row for row in ROWS if row.needs == distribution]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NVRX_", "FT_", "SLURM"))
    }
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps([row.code for row in rows]),
        capture_output=True, text=True, timeout=170, env=environment, check=False,
    )  # fmt: skip
    answers = [json.loads(line) for line in result.stdout.splitlines() if line[:1] in {"n", '"'}]
    assert len(answers) == len(rows), result.stdout + result.stderr
    failed = [
        f"{row.caller}, {row.where}:\n{answer}"
        for row, answer in zip(rows, answers, strict=True)
        if answer is not None
    ]
    assert not failed, "\n".join(failed)
