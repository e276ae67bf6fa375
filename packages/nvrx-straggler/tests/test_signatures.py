# SPDX-License-Identifier: Apache-2.0
"""What programs name: fields, parameters and attributes, with their order and defaults."""

import dataclasses
import inspect

import pytest

from nvidia_resiliency_ext.attribution.straggler import (
    CallableId,
    Detector,
    Report,
    StragglerId,
    dist_utils,
    name_mapper,
    straggler,
)
from nvidia_resiliency_ext.attribution.straggler.cupti import CuptiManager
from nvidia_resiliency_ext.attribution.straggler.interval_tracker import ReportIntervalTracker
from nvidia_resiliency_ext.attribution.straggler.reporting import ReportGenerator

NO_DEFAULT = inspect.Parameter.empty


class Outer:
    class Inner:
        def step(self):
            """Do nothing."""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CallableId, "obj name arg_filter_fn extra_args_fn ignored_args"),
        (StragglerId, "rank node"),
        (
            Report,
            (
                "gpu_relative_perf_scores section_relative_perf_scores gpu_individual_perf_scores"
                " section_individual_perf_scores rank_to_node local_section_summaries"
                " local_kernel_summaries generate_report_elapsed_time gather_on_rank0 rank"
            ),
        ),
        (
            ReportIntervalTracker,
            (
                "INTERVAL_ESTIMATION_ITERS time_interval current_iter iter_interval"
                " prev_iter_start_time step_times profiling_interval"
            ),
        ),
        (
            straggler.CustomSection,
            "name location total_entry_cnt max_elapseds_len cpu_elapsed_times",
        ),
    ],
)
def test_fields_come_in_this_order(kind, fields):
    """Fields that programs give by position come first, in the order that they know."""
    given = [field.name for field in dataclasses.fields(kind)]
    assert given[: len(fields.split())] == fields.split()


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (
            Detector.initialize,
            {
                "scores_to_compute": "all",
                "gather_on_rank0": True,
                "profiling_interval": 1,
                "report_time_interval": 60,
                "node_name": None,
            },
        ),
        (Detector.detection_section, {"name": None, "profile_cuda": True}),
        (Detector.wrap_callables, {"callable_ids": NO_DEFAULT, "profile_cuda": True}),
        (
            Report.identify_stragglers,
            {
                "self": NO_DEFAULT,
                "gpu_rel_threshold": 0.75,
                "section_rel_threshold": 0.75,
                "gpu_indiv_threshold": 0.75,
                "section_indiv_threshold": 0.75,
            },
        ),
        (
            ReportGenerator,
            {
                "scores_to_compute": NO_DEFAULT,
                "gather_on_rank0": True,
                "pg": None,
                "node_name": "<notset>",
            },
        ),
        (
            CuptiManager,
            {"bufferSize": 1_000_000, "numBuffers": 8, "statsMaxLenPerKernel": 4096},
        ),
        (name_mapper.NameMapper, {"pg": None}),
        (dist_utils.all_gather_object, {"obj": NO_DEFAULT, "group": None}),
        (dist_utils.gather_on_rank0, {"tensor": NO_DEFAULT, "group": None}),
        (dist_utils.is_all_true, {"flag": NO_DEFAULT, "group": None}),
    ],
)
def test_parameters_come_in_this_order(function, parameters):
    """Parameters that programs give come first, with the defaults that they know."""
    found = {name: item.default for name, item in inspect.signature(function).parameters.items()}
    assert list(found.items())[: len(parameters)] == list(parameters.items())


def test_values_cannot_be_changed():
    """What identifies a callable, a straggler or a report is frozen."""
    for value, name in (
        (CallableId(Outer, "Inner"), "name"),
        (StragglerId(1, "a"), "rank"),
        (Report({}, {}, {}, {}, {}, {}, {}, 0.0, True), "rank"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 1)


def test_a_nested_class_goes_by_its_own_name():
    """The section of a class's method is named after module and class, without the outer class."""
    assert str(CallableId(Outer.Inner, "step")) == f"{__name__}.Inner.step"
    assert str(CallableId(Outer.Inner(), "step")) == "Inner.step"


def test_detector_has_its_attributes_before_and_after():
    """Attributes that programs read are there without a detector, and filled with one."""
    names = (
        "scores_to_compute gather_on_rank0 profiling_interval report_time_interval"
        " custom_sections cupti_manager reporter report_interval_tracker original_callables"
    )
    assert Detector.initialized is False
    assert all(hasattr(Detector, name) for name in names.split())
    Detector.initialize(
        "relative_perf_scores", False, 3, 7.0, "here", cuda_profiling="off", control=False
    )
    assert list(Detector.scores_to_compute) == ["relative_perf_scores"]
    assert (Detector.gather_on_rank0, Detector.profiling_interval) == (False, 3)
    assert Detector.report_time_interval == 7.0
    assert Detector.reporter.node_name == "here"
    assert (Detector.reporter.rank, Detector.reporter.world_size) == (0, 1)
    assert Detector.report_interval_tracker.time_interval == 7.0
