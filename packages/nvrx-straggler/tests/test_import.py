# SPDX-License-Identifier: Apache-2.0
"""The two import paths, and what an import brings along."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
import {first} as one
one.Detector, one.CallableId
brought = sorted(set(sys.modules) - before)
names = "reporting statistics straggler name_mapper interval_tracker dist_utils cupti".split()
attributes = [getattr(one, name).__name__ for name in names]
import importlib
import {second} as two
import nvidia_resiliency_ext.attribution
pairs = [[importlib.import_module(f"{{path}}.{{name}}") for path in ("{first}", "{second}")]
         for name in names]
print(json.dumps({{
    "same": one is two and all(a is b for a, b in pairs),
    "attributes": attributes == [f"{new}.{{name}}" for name in names],
    "generator": one.reporting.ReportGenerator.__name__,
    "new": sorted({{name.split(".")[0] for name in set(sys.modules) - before}}),
    "attribution": [n for n in sys.modules if n == "nvidia_resiliency_ext.attribution._api"],
    "brought": brought,
}}))
"""
NEW = "nvidia_resiliency_ext.attribution.straggler"
OLD = "nvidia_resiliency_ext.straggler"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("first", "second"), [(NEW, OLD), (OLD, NEW)])
def test_paths_are_one_module(first, second):
    """Both paths give the same module objects, whichever comes first, without heavy packages."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(first=first, second=second, new=NEW)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["same"]
    assert found["attributes"]
    assert found["generator"] == "ReportGenerator"
    assert found["attribution"] == []
    allowed = {"nvidia_resiliency_ext", *sys.stdlib_module_names, "numpy", "torch"}
    assert set(found["new"]) <= allowed
    # What only `initialize` needs is loaded by it; these are the costly ones.
    late = ("_session", "_exchange", "shared_utils.events", "shared_utils.wire")
    assert not [name for name in found["brought"] if name.endswith(late)]
