# SPDX-License-Identifier: Apache-2.0
"""Kernel timing on a real GPU, with the libcupti of torch."""

import pytest
import torch

from nvidia_resiliency_ext.attribution.straggler import Detector, Statistic

pytest.importorskip("nvrx_cupti_module", reason="the extension was not built")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture
def detector(monkeypatch):
    monkeypatch.delenv("NVRX_CUPTI_LIBRARY")
    Detector.initialize(cuda_profiling="require", control=False)
    yield Detector
    Detector.shutdown()


def test_kernels_of_a_section_are_timed(detector):
    """Kernels launched inside a section are in the report, those launched outside are not."""
    matrix = torch.randn(512, 512, device="cuda")
    with detector.detection_section("step"):
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)
    torch.sort(matrix.flatten())
    report = detector.generate_report()
    kernels = report.local_kernel_summaries
    assert report.cuda_profiling_status == "ok"
    assert any("tanh" in name for name in kernels)
    assert not any("sort" in name.lower() for name in kernels)
    assert all(kernel[Statistic.MED] > 0 for kernel in kernels.values())
    assert report.gpu_relative_perf_scores == {0: 1.0}


def test_kernels_of_a_graph_are_timed_one_by_one(detector):
    """A graph that was captured before the section gives its kernels at each replay."""
    matrix = torch.randn(256, 256, device="cuda")
    torch.tanh(matrix)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.tanh(matrix)
    with detector.detection_section("replay"):
        for _ in range(5):
            graph.replay()
    kernels = detector.generate_report().local_kernel_summaries
    (tanh,) = [summary for name, summary in kernels.items() if "tanh" in name]
    assert tanh[Statistic.NUM] == 5


def test_timing_goes_on_after_the_profiler_of_torch(detector):
    """While torch.profiler runs kernels go untimed, and afterwards they are timed again."""
    matrix = torch.randn(256, 256, device="cuda")
    with torch.profiler.profile(), detector.detection_section("step"):
        torch.tanh(matrix)
    assert detector.generate_report().cuda_profiling_status == "paused: torch.profiler"
    with detector.detection_section("step"):
        torch.tanh(matrix)
    report = detector.generate_report()
    assert report.cuda_profiling_status == "ok"
    assert any("tanh" in name for name in report.local_kernel_summaries)
