# SPDX-License-Identifier: Apache-2.0
"""The straggler callback in real Lightning trainings, with the real detector on CPU."""

import logging
import math
import sys
from types import SimpleNamespace

import pytest
import torch

straggler = pytest.importorskip("nvidia_resiliency_ext.attribution.straggler")

from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: E402
from lightning_jobs import SmallModule, trainer  # noqa: E402

from nvidia_resiliency_ext.ptl_resiliency import StragglerDetectionCallback  # noqa: E402
from nvidia_resiliency_ext.ptl_resiliency.straggler_det_callback import score_lines  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

OPTIONS = {
    "report_time_interval": 0.001,
    "calc_relative_gpu_perf": True,
    "calc_individual_gpu_perf": True,
    "num_gpu_perf_scores_to_print": 2,
    "gpu_relative_perf_threshold": 0.7,
    "gpu_individual_perf_threshold": 0.7,
    "stop_if_detected": True,
}


@pytest.fixture(autouse=True)
def _real_cupti_stays_out(clean_environment):
    """Keep the machine's libcupti out of this process, and leave no detector."""
    clean_environment.setenv("NVRX_CUPTI_LIBRARY", "/nonexistent/libcupti.so")
    yield
    straggler.Detector.shutdown()


class KernelTimes:
    """Stands for the extension's profiler on a GPU: one kernel that becomes slow after a while."""

    reports = 0
    dropped_records = 0

    def __init__(self, **_options):
        self.initialize = self.shutdown = self.start = self.stop = self.reset = lambda: None

    def get_stats(self):
        KernelTimes.reports += 1
        us = 5.0 if KernelTimes.reports < 3 else 10.0
        times = {"min": us, "max": us, "median": us, "avg": us, "stddev": 0.0, "num_calls": 10}
        return {"matmul": SimpleNamespace(total_time_us=10 * us, **times)}


@pytest.fixture
def slow_gpu(monkeypatch):
    """Give the detector kernel times; the third report and all later ones are slow."""
    KernelTimes.reports = 0
    module = SimpleNamespace(CuptiProfiler=KernelTimes)
    monkeypatch.setitem(sys.modules, "nvrx_cupti_module", module)


def test_reports_on_cpu(tmp_path, one_rank, caplog):
    """Without a GPU the training runs to its end, reports are made and the step is given back."""
    callback = StragglerDetectionCallback(**OPTIONS, enable_ptl_logging=True)
    for steps in (40, 80):
        with caplog.at_level(logging.INFO):
            job = trainer(tmp_path, [callback], max_steps=steps)
            job.fit(SmallModule())
        assert job.global_step == steps
        assert not straggler.Detector.initialized
        assert "training_step" not in vars(job.strategy)
    assert "Straggler report processing time: " in caplog.text
    assert "STRAGGLER DETECTION WARNING" not in caplog.text


def test_a_straggler_ends_the_training(tmp_path, one_rank, slow_gpu, caplog):
    """A slow rank is named, the last checkpoint saved, and the program ends with status 1."""
    callback = StragglerDetectionCallback(**OPTIONS)
    with caplog.at_level(logging.INFO):
        job = trainer(tmp_path, [callback], max_steps=500)
        with pytest.raises(SystemExit) as ended:
            job.fit(SmallModule())
    assert ended.value.code == 1
    assert "Some GPUs performance dropped. Affected ranks: {StragglerId(rank=0" in caplog.text
    assert "GPU individual performance" in caplog.text
    assert "Detected stragglers. Terminating training..." in caplog.text
    last = torch.load(tmp_path / "ckpt" / "last.ckpt", weights_only=False)
    assert last["global_step"] == job.global_step < 500
    assert not straggler.Detector.initialized


def bare_trainer(folder, callback, **options):
    """Return a trainer of one gloo rank without any checkpoint callback."""
    return Trainer(
        accelerator="cpu", devices=1, strategy="ddp", logger=False, max_steps=500,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[callback], limit_val_batches=0, **options,
    )  # fmt: skip


def test_a_straggler_ends_a_training_without_checkpoints(tmp_path, one_rank, slow_gpu):
    """The exit status is 1 also where no checkpoint callback could save anything."""
    job = bare_trainer(tmp_path, StragglerDetectionCallback(**OPTIONS))
    with pytest.raises(SystemExit) as ended:
        job.fit(SmallModule())
    assert ended.value.code == 1
    assert job.should_stop
    assert job.global_step < 500
    assert not straggler.Detector.initialized


class Finalizing(TorchCheckpointIO):
    """Saves as usual, and is asked to finish what runs in the background."""

    def __init__(self):
        self.calls = []

    def save_checkpoint(self, *args, **options):
        self.calls.append("save")
        super().save_checkpoint(*args, **options)

    def maybe_finalize_save_checkpoint(self, blocking=False):
        self.calls.append(blocking)
        return True


def test_the_last_save_is_waited_for(tmp_path, one_rank, slow_gpu):
    """A save that runs in the background is finished before the program ends."""
    io = Finalizing()
    job = trainer(tmp_path, [StragglerDetectionCallback(**OPTIONS)], max_steps=500, plugins=[io])
    with pytest.raises(SystemExit):
        job.fit(SmallModule())
    assert io.calls[-2:] == ["save", True]


def test_scores_are_metrics(tmp_path, one_rank, slow_gpu, caplog):
    """Least, median and greatest score of each kind are logged; a failing logger costs a line."""
    logged = []

    class Module(SmallModule):
        def log_dict(self, metrics, **options):
            logged.append((metrics, options))
            raise OSError("the disk of the logger is full")

    options = {**OPTIONS, "stop_if_detected": False, "enable_ptl_logging": True}
    job = trainer(tmp_path, [StragglerDetectionCallback(**options)], max_steps=60)
    with caplog.at_level(logging.INFO):
        job.fit(Module())
    assert job.global_step == 60
    relative, individual = logged[0][0], logged[1][0]
    assert relative == dict.fromkeys(
        ("gpu_relative_perf/min", "gpu_relative_perf/median", "gpu_relative_perf/max"), 1.0
    )
    assert list(individual) == [f"gpu_individual_perf/{name}" for name in ("min", "median", "max")]
    assert logged[-1][0]["gpu_individual_perf/min"] == 0.5
    assert logged[0][1] == {"logger": True, "batch_size": 1, "rank_zero_only": True}
    assert "the scores were not logged as metrics" in caplog.text


def test_the_users_exception_ends_the_detector(tmp_path, one_rank):
    """An exception in a step reaches the user, the step is given back, and a second fit works."""
    callback = StragglerDetectionCallback(**OPTIONS)

    def fail(step):
        if step == 2:
            raise KeyError("of the user")

    job = trainer(tmp_path, [callback])
    with pytest.raises(KeyError, match="of the user"):
        job.fit(SmallModule(fail))
    assert not straggler.Detector.initialized
    assert "training_step" not in vars(job.strategy)
    again = trainer(tmp_path, [callback])
    again.fit(SmallModule())
    assert again.global_step == 6


@pytest.mark.parametrize("options", [{"stop_if_detected": False}, {"stop_after_n_reports": 1000}])
def test_a_straggler_that_is_only_named(tmp_path, one_rank, slow_gpu, options):
    """Without stopping, or before enough reports, the training goes on to its end."""
    callback = StragglerDetectionCallback(**{**OPTIONS, **options})
    job = trainer(tmp_path, [callback], max_steps=60)
    job.fit(SmallModule())
    assert job.global_step == 60
    assert KernelTimes.reports > 3


@pytest.mark.parametrize("kind", ["relative", "individual"])
def test_a_score_that_is_off_needs_no_threshold(tmp_path, one_rank, slow_gpu, kind):
    """With one score switched off and its threshold None, reports are handled to the end."""
    off = {f"calc_{kind}_gpu_perf": False, f"gpu_{kind}_perf_threshold": None}
    callback = StragglerDetectionCallback(**{**OPTIONS, **off, "stop_if_detected": False})
    job = trainer(tmp_path, [callback], max_steps=60)
    job.fit(SmallModule())
    assert job.global_step == 60
    assert KernelTimes.reports > 3


def test_arguments():
    """The older name of a parameter warns; what cannot work is refused with the reason."""
    older = {name: value for name, value in OPTIONS.items() if "to_print" not in name}
    with pytest.warns(UserWarning, match="num_gpu_perf_scores_to_print"):
        callback = StragglerDetectionCallback(**older, num_gpu_perf_scores_to_log=3)
    assert callback.num_gpu_perf_scores_to_print == 3
    neither = {"calc_relative_gpu_perf": False, "calc_individual_gpu_perf": False}
    zeros = ({"num_gpu_perf_scores_to_print": -1}, {"stop_after_n_reports": 0})
    for wrong in (neither, *zeros, {"gpu_relative_perf_threshold": 75}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            StragglerDetectionCallback(**{**OPTIONS, **wrong})


def test_lines_of_scores():
    """The worst and best ranks are listed, all of few; NaN comes last and is never best."""
    nodes = dict.fromkeys(range(6), "n")
    scores = {0: 0.9, 1: math.nan, 2: 0.5, 3: 1.0, 4: 0.7, 5: 0.8}
    assert score_lines(scores, nodes, 2) == [
        " Worst performing 2/6 ranks:",
        "  Rank=2 Node=n Score=0.50",
        "  Rank=4 Node=n Score=0.70",
        " Best performing 2/6 ranks:",
        "  Rank=3 Node=n Score=1.00",
        "  Rank=0 Node=n Score=0.90",
    ]
    assert score_lines(scores, nodes, 3)[-1] == "  Rank=1 Node=n Score=nan"
