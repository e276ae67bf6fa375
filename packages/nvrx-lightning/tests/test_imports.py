# SPDX-License-Identifier: Apache-2.0
"""What importing needs, which Lightning is taken, and what a missing distribution says."""

import inspect
import json
import subprocess
import sys

import pytest

BLOCK = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in BLOCKED):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
BLOCKED = %r
sys.meta_path.insert(0, Blocker())
"""
# Each program imports torch and Lightning, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(180)

OURS = [
    "nvidia_resiliency_ext.fault_tolerance",
    "nvidia_resiliency_ext.checkpointing",
    "nvidia_resiliency_ext.attribution.straggler",
]


def python(code, blocked=()):
    """Run a program in which some modules cannot be imported; return what it printed as JSON."""
    program = (BLOCK % (list(blocked),)) + code
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=170, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_names_are_there_and_construction_says_what_is_missing():
    """Without the other packages every name is a class; constructing it names the extra."""
    told = python(
        """
import json
import nvidia_resiliency_ext.ptl_resiliency as res
from nvidia_resiliency_ext.ptl_resiliency.local_checkpoint_callback import LocalCheckpointCallback
numbers = dict(report_time_interval=1, calc_relative_gpu_perf=True, calc_individual_gpu_perf=True,
               num_gpu_perf_scores_to_print=1, gpu_relative_perf_threshold=0.7,
               gpu_individual_perf_threshold=0.7, stop_if_detected=False, enable_ptl_logging=True)
told = {}
for make in (lambda: res.FaultToleranceCallback(autoresume=True, calculate_timeouts=True),
             lambda: res.FaultToleranceSectionsCallback(True, True),
             lambda: res.StragglerDetectionCallback(**numbers),
             lambda: LocalCheckpointCallback(every_n_train_steps=1)):
    try:
        make()
    except ImportError as error:
        told[str(len(told))] = str(error)
print(json.dumps(told))
""",
        OURS,
    )
    extras = ["ft", "ft", "straggler", "ckpt"]
    assert len(told) == len(extras)
    for text, extra in zip(told.values(), extras, strict=True):
        assert f"pip install 'nvrx-lightning[{extra}]'" in text


FRAMEWORK = """
from nvidia_resiliency_ext.ptl_resiliency import _framework
print(_framework.Callback.__module__.split(".")[0])
"""
# Runs programs one after the other, each in a process of its own that has torch already.
FORKING = """
import os, sys, warnings
import torch
warnings.simplefilter("ignore")
for program in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


@pytest.mark.slow
def test_the_programs_own_lightning_is_taken():
    """The callbacks derive from the Lightning that the program uses, or that is installed."""
    uses = "import pytorch_lightning" + FRAMEWORK
    has_one = BLOCK % (["pytorch_lightning"],) + FRAMEWORK
    result = subprocess.run(
        [sys.executable, "-c", FORKING, uses, has_one],
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["pytorch_lightning", "lightning"]


def test_without_any_lightning():
    """Importing the package works without Lightning; using a name says how to install it."""
    text = python(
        """
import json
import nvidia_resiliency_ext.ptl_resiliency as res
try:
    res.FaultToleranceCallback
except ImportError as error:
    print(json.dumps(str(error)))
""",
        ["lightning", "pytorch_lightning"],
    )
    assert "pip install 'nvrx-lightning[lightning]'" in text


def test_signatures_that_others_inspect():
    """Classes say the module they live in, and their parameters have the names NeMo passes."""
    import nvidia_resiliency_ext.ptl_resiliency as res

    kind = res.FaultToleranceCallback
    assert kind.__module__.endswith(".fault_tolerance_callback")
    parameters = inspect.signature(kind).parameters
    assert list(parameters)[:5] == [
        "autoresume", "calculate_timeouts", "simulated_fault_params", "exp_dir", "logger_name",
    ]  # fmt: skip
    names = list(inspect.signature(res.StragglerDetectionCallback).parameters)
    assert names[7:10] == ["enable_ptl_logging", "profiling_interval", "logger_name"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"fault_type": "nothing"}, "nothing"),
        ({"base_delay": -1.0}, "base_delay"),
        ({"rand_delay": float("nan")}, "rand_delay"),
        ({"rank_to_fail": -1}, "rank_to_fail"),
        ({"strange": 1}, "strange"),
    ],
)
def test_a_wrong_fault_is_refused(fields, text):
    """A simulated fault that cannot happen is a ValueError that names the field."""
    from nvidia_resiliency_ext.ptl_resiliency._utils import parse_simulated_fault_params

    with pytest.raises(ValueError, match=text):
        parse_simulated_fault_params({"fault_type": "random", "base_delay": 1.0, **fields})
    with pytest.raises(ValueError, match="mapping"):
        parse_simulated_fault_params("rank_hung")
    assert parse_simulated_fault_params(None) is None
