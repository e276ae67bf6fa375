# SPDX-License-Identifier: Apache-2.0
"""Timed sections and timed callables in one process."""

import asyncio
import copy
import functools
import itertools
import logging
import math
import pickle
import socket
import subprocess
import sys
import threading
import types

import pytest
import torch

from nvidia_resiliency_ext.attribution.straggler import CallableId, Detector, Statistic
from nvidia_resiliency_ext.attribution.straggler._measure import kernel_capture, sections
from nvidia_resiliency_ext.attribution.straggler.statistics import SummaryTable, summarize
from nvidia_resiliency_ext.shared_utils.errors import ConfigError


class Model:
    """Has every kind of callable attribute."""

    def step(self, value=1):
        """Do a step."""
        return ("step", self, value)

    @staticmethod
    def static(value):
        return ("static", value)

    @classmethod
    def build(cls, value):
        return ("build", cls, value)

    async def fetch(self):
        await asyncio.sleep(0.02)
        return "fetched"

    def stream(self):
        sent = yield 1
        return sent


class Inheriting(Model):
    """Has its callables from its base."""


class Slotted:
    """Has no instance dictionary."""

    __slots__ = ()

    def step(self):
        return 1


@pytest.fixture
def start():
    def begin(**options):
        given = {"cuda_profiling": "off", "control": False, "gather_on_rank0": False}
        Detector.initialize(**{**given, **options})

    yield begin
    Detector.shutdown()


def samples(name):
    return list(Detector.custom_sections[name].cpu_elapsed_times)


def test_statistics_are_one_definition():
    """Medians are means of middles, the deviation is that of a population, NaN for one sample."""
    table = SummaryTable(["a", "b"], [summarize([4.0, 1.0, 2.0, 9.0]), summarize([5.0])])
    assert table["a"] == {
        Statistic.MIN: 1.0,
        Statistic.MAX: 9.0,
        Statistic.MED: 3.0,
        Statistic.AVG: 4.0,
        Statistic.STD: pytest.approx(math.sqrt(9.5)),
        Statistic.NUM: 4,
    }
    assert math.isnan(table["b"][Statistic.STD])
    assert list(Statistic) == [Statistic(number) for number in range(1, 7)]
    assert (str(Statistic.MED), repr(Statistic.MED)) == ("MED", "Statistic.MED")
    assert pickle.loads(pickle.dumps(Statistic.MED)) is Statistic.MED
    assert pickle.loads(pickle.dumps(table))["a"] == table["a"]


def test_entries_are_measured_at_the_interval(start):
    """Entry n is measured if n is a multiple of the interval, beginning with the first."""
    start(profiling_interval=3)
    for _ in range(7):
        with Detector.detection_section("s", profile_cuda=False):
            pass
    section = Detector.custom_sections["s"]
    assert section.total_entry_cnt == 7
    assert len(section.cpu_elapsed_times) == 3
    assert section.location.startswith(f"{__file__}:")
    assert section.cpu_elapsed_times.maxlen == section.max_elapseds_len == 8192


def test_section_without_a_name_is_its_place(start):
    """Sections without a name are named after their line, and two lines are two sections."""
    start()
    for _ in range(2):
        with Detector.detection_section():
            pass
    with Detector.detection_section():
        pass
    names = list(Detector.custom_sections)
    assert [name.rpartition(":")[0] for name in names] == [__file__, __file__]
    assert [len(samples(name)) for name in names] == [2, 1]


def test_exception_leaves_no_sample(start):
    """A body that raises leaves no sample, and its exception arrives unchanged."""
    start()
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, Detector.detection_section("s"):
        raise error
    assert caught.value is error
    assert samples("s") == []
    with Detector.detection_section("other"):
        pass
    assert list(Detector.generate_report().local_section_summaries) == ["other"]


@pytest.mark.parametrize("has_capture", [False, True])
@pytest.mark.parametrize("kind", ["section", "call", "coroutine", "generator"])
def test_every_kind_of_entry_is_measured_alike(start, monkeypatch, kind, has_capture):
    """Sections and wrapped calls of any kind leave milliseconds of every third entry.

    A body that raises leaves none.
    """
    start(profiling_interval=3)
    on = []
    capture = types.SimpleNamespace(start=lambda: not on.append(1), stop=on.pop)
    monkeypatch.setattr(Detector._registry, "capture", capture if has_capture else None)
    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr(sections, "perf_counter", lambda: next(clock))
    model = types.SimpleNamespace()

    def call(fails):
        assert len(on) == (has_capture and Detector._registry.capture is capture and is_measured)
        if fails:
            raise KeyError

    async def coroutine(fails):
        call(fails)

    def generator(fails):
        yield call(fails)

    model.call, model.coroutine, model.generator = call, coroutine, generator
    Detector.wrap_callables([CallableId(model, name) for name in vars(model)])

    def section(fails):
        with Detector.detection_section("SimpleNamespace.section"):
            call(fails)

    run = {
        "section": section,
        "call": model.call,
        "coroutine": lambda fails: asyncio.run(model.coroutine(fails)),
        "generator": lambda fails: list(model.generator(fails)),
    }[kind]
    for number in range(7):
        is_measured = number % 3 == 0
        if number == 3:
            with pytest.raises(KeyError):
                run(True)
        else:
            run(False)
        assert on == []
    assert samples(f"SimpleNamespace.{kind}") == [250.0, 250.0]


def test_a_report_begins_a_new_window(start):
    """What is in one report is not in the next."""
    start()
    for count in (3, 2):
        for _ in range(count):
            with Detector.detection_section("s"):
                pass
        summary = Detector.generate_report().local_section_summaries["s"]
        assert summary[Statistic.NUM] == count
    assert Detector.generate_report().local_section_summaries == {}


def test_one_name_at_two_places_is_said_once(start, caplog):
    """The same name at two places is accepted, with one warning."""
    start()
    for _ in range(4):
        with Detector.detection_section("s"):
            pass
        for _ in range(2):  # the place of entry n is looked at if n is a power of two
            with Detector.detection_section("s"):
                pass
    assert len(samples("s")) == 12
    assert [r.levelname for r in caplog.records if "'s' is entered at" in r.message] == ["WARNING"]


def test_sections_are_bounded(start, caplog, monkeypatch):
    """Names that change with every step share one section beyond a number, with one warning."""
    monkeypatch.setattr(sections, "MAX_SECTIONS", 3)
    start()
    for _ in range(2):
        for step in range(6):
            with Detector.detection_section(f"step {step}"):
                pass
    names = ["step 0", "step 1", "step 2", "<other sections>"]
    assert [(name, len(samples(name))) for name in Detector.custom_sections] == [
        (name, 2 if name.startswith("step") else 6) for name in names
    ]
    said = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == 1
    assert "more than 3 sections, such as 'step 3'" in said[0]


@pytest.fixture
def often_switching():
    """Let threads take turns after a few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_sections_nest_cross_and_run_in_threads(start, often_switching):
    """Nested, crossing and concurrent entries lose no sample, also while reports are made."""
    start()
    outer = Detector.detection_section("outer")
    crossing = Detector.detection_section("crossing")
    outer.__enter__()
    with Detector.detection_section("inner"), Detector.detection_section("inner"):
        crossing.__enter__()
        outer.__exit__(None, None, None)
        crossing.__exit__(None, None, None)
    assert [len(samples(name)) for name in ("outer", "inner", "crossing")] == [1, 2, 1]
    Detector.generate_report()
    count, threads = 2000, 4  # no more than a window holds
    begin = threading.Barrier(threads + 1)

    def work():
        begin.wait(60)
        for _ in range(count):
            with Detector.detection_section("shared"):
                pass

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    counted = 0
    begin.wait(60)
    while any(worker.is_alive() for worker in workers):
        summary = Detector.generate_report().local_section_summaries.get("shared", {})
        counted += summary.get(Statistic.NUM, 0)
    for worker in workers:
        worker.join()
    summary = Detector.generate_report().local_section_summaries.get("shared", {})
    assert counted + summary.get(Statistic.NUM, 0) == count * threads


def test_nothing_waits_for_the_gpu_but_a_report(start, monkeypatch):
    """Sections and wrapped calls never synchronise the device; a report does, once."""
    waits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(1))
    manager = types.SimpleNamespace(
        start_profiling=lambda: None, stop_profiling=lambda: None, shutdown=lambda: None,
        get_results=dict, reset_results=lambda: None, cupti_ext=None,
    )  # fmt: skip
    monkeypatch.setattr(kernel_capture, "_claim", lambda: (manager, ""))
    start(cuda_profiling="require")
    model = Model()
    Detector.wrap_callables([CallableId(model, "step")])
    with Detector.detection_section("s"):
        model.step()
    assert waits == []
    Detector.generate_report()
    assert waits == [1]


def test_a_device_that_fails_costs_the_data_and_not_the_report(start, monkeypatch, caplog):
    """Where kernels cannot be waited for, the report has no data of this rank, and the log why."""

    def fail():
        raise RuntimeError("CUDA error: device-side assert triggered")

    start()
    monkeypatch.setattr(Detector._session, "capture", types.SimpleNamespace(
        status="ok", close=lambda: None))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    report = Detector.generate_report()
    assert report.details[0].cuda_profiling_status == "failed"
    assert "device-side assert" in caplog.text


def test_nodes_are_named_after_the_host(start):
    """Without a name of one's own the node has the name of the host."""
    start()
    assert dict(Detector.generate_report().rank_to_node) == {0: socket.gethostname()}


def test_pause_passes_entries(start):
    """While paused nothing is counted; afterwards measuring goes on."""
    start()
    Detector.pause()
    with Detector.detection_section("s"):
        pass
    assert "s" not in Detector.custom_sections
    assert Detector.generate_report().cuda_profiling_status == "paused"
    Detector.resume()
    with Detector.detection_section("s"):
        pass
    assert len(samples("s")) == 1


@pytest.mark.parametrize(
    ("target", "name", "call", "expected"),
    [
        (Model(), "step", lambda o: o.step(2)[::2], ("step", 2)),
        (Model, "step", lambda o: o().step(value=3)[::2], ("step", 3)),
        (Model, "static", lambda o: (o.static(1), o().static(1)), (("static", 1),) * 2),
        (Model, "build", lambda o: (o.build(1), o().build(1)), (("build", Model, 1),) * 2),
        (Inheriting, "build", lambda o: o().build(1), ("build", Inheriting, 1)),
        (Inheriting, "static", lambda o: o().static(1), ("static", 1)),
        (Inheriting(), "static", lambda o: o.static(1), ("static", 1)),
        (Inheriting(), "build", lambda o: o.build(1), ("build", Inheriting, 1)),
        (math, "sqrt", lambda o: o.sqrt(4.0), 2.0),
        (types.SimpleNamespace(f=functools.partial(max, 3)), "f", lambda o: o.f(1), 3),
    ],
)
def test_callables_of_every_kind_are_timed_and_restored(start, target, name, call, expected):
    """Wrapped callables give what they gave, are timed, and come back exactly as they were."""
    before = dict(vars(target))
    start()
    callable_id = CallableId(target, name, ignored_args=("self",))
    Detector.wrap_callables([callable_id])
    Detector.wrap_callables(callable_ids=[callable_id])
    assert call(target) == expected
    section = str(callable_id)
    calls = 2 if isinstance(expected, tuple) and isinstance(expected[0], tuple) else 1
    assert len(samples(section)) == calls
    Detector.shutdown()
    assert dict(vars(target)) == before


def test_several_wraps_are_all_restored(start, caplog):
    """A second call of wrap_callables keeps the originals of the first; like names are told."""
    first, second = Model(), Model()
    start()
    Detector.wrap_callables([CallableId(first, "step")])
    Detector.wrap_callables([CallableId(second, "step"), CallableId(Model, "static")])
    assert str(CallableId(first, "step")) == "Model.step"
    assert str(CallableId(Model, "step")) == f"{__name__}.Model.step"
    assert str(CallableId(math, "sqrt")) == "math.sqrt"
    assert CallableId(first, "step") != CallableId(second, "step")
    assert hash(CallableId([], "append"))
    assert first.step.__doc__ == "Do a step."
    assert first.step()[1] is first
    assert second.step()[1] is second
    assert len(samples("Model.step")) == 2
    assert len([r for r in caplog.records if "two objects are wrapped" in r.message]) == 1
    Detector.restore_original_callables()
    assert vars(first) == vars(second) == {}
    assert isinstance(vars(Model)["static"], staticmethod)


class Frozen:
    """Refuses, once it is told to, to have attributes set."""

    is_frozen = False

    def step(self):
        return 1

    def __delattr__(self, name):
        if self.is_frozen:
            raise AttributeError(f"{name} is frozen")
        super().__delattr__(name)


def test_shutdown_goes_on_after_a_callable_that_cannot_be_restored(start):
    """The error names it; all other callables, the profiler and the threads are given back."""
    first, frozen, last = Model(), Frozen(), Model()
    start(control=True)
    Detector.generate_report_if_interval_elapsed()
    Detector.wrap_callables([CallableId(obj, "step") for obj in (first, frozen, last)])
    frozen.__dict__["is_frozen"] = True
    with pytest.raises(AttributeError, match="step is frozen"):
        Detector.shutdown()
    assert vars(first) == vars(last) == {}
    assert frozen.step() == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("nvrx-straggler")]
    start()


def test_a_wrapper_under_another_one_only_passes_calls_on(start):
    """What somebody put over a wrapped callable stays, and the restored wrapper times nothing."""
    model = Model()
    start()
    Detector.wrap_callables([CallableId(model, "step")])
    covered = model.step
    model.step = lambda: ("outer", *covered())
    Detector.restore_original_callables()
    assert model.step() == ("outer", "step", model, 1)
    assert samples("Model.step") == []


def test_what_cannot_be_wrapped_is_refused(start):
    """An attribute that is missing, cannot be set or called is an error that names it."""
    start()
    with pytest.raises(AttributeError):
        Detector.wrap_callables([CallableId(Model, "absent")])
    with pytest.raises(AttributeError):
        Detector.wrap_callables([CallableId(Slotted(), "step")])
    with pytest.raises(TypeError, match="cannot be called"):
        Detector.wrap_callables([CallableId(types.SimpleNamespace(n=1), "n")])
    with pytest.raises(TypeError, match=r"wrap_callables: 'step' is no CallableId"):
        Detector.wrap_callables(["step"])


def test_callables_are_wrapped_all_or_none(start, caplog):
    """If one callable of several cannot be wrapped, none is, and those of before stay wrapped."""
    before, first, second = Model(), Model(), Model()
    start()
    Detector.wrap_callables([CallableId(before, "fetch")])
    wrong = CallableId(Model, "absent")
    with pytest.raises(AttributeError, match="absent"):
        Detector.wrap_callables([CallableId(first, "step"), CallableId(Model, "static"), wrong])
    assert vars(first) == {}
    assert isinstance(vars(Model)["static"], staticmethod)
    assert list(Detector.original_callables) == [CallableId(before, "fetch")]
    assert "fetch" in vars(before)
    Detector.wrap_callables([CallableId(second, "step")])
    assert "two objects are wrapped" not in caplog.text


def test_coroutines_and_generators_are_timed_over_their_run(start):
    """A coroutine counts until its result and a generator until its end."""
    model = Model()
    start()
    Detector.wrap_callables([CallableId(model, "fetch"), CallableId(model, "stream")])
    assert asyncio.run(model.fetch()) == "fetched"
    assert samples("Model.fetch")[0] > 15
    running = model.stream()
    assert next(running) == 1
    assert samples("Model.stream") == []
    with pytest.raises(StopIteration) as ended:
        running.send("sent")
    assert ended.value.value == "sent"
    assert len(samples("Model.stream")) == 1


def test_copy_of_a_wrapped_module_calls_its_own_forward(start):
    """A deep copy of a module whose forward is wrapped runs the copy's parameters."""
    module = torch.nn.Linear(2, 2)
    start()
    Detector.wrap_callables([CallableId(module, "forward")])
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.fill_(7.0)
    assert copied(torch.ones(1, 2)).tolist() == [[7.0, 7.0]]
    assert len(samples("Linear.forward")) == 1


@pytest.mark.slow
def test_wrapped_module_compiles_without_a_break(start):
    """torch.compile traces a wrapped forward in one graph."""
    module = torch.nn.Linear(2, 2)
    start()
    Detector.wrap_callables([CallableId(module, "forward")])
    given = torch.ones(1, 2)
    expected = module(given)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(given), expected)


def calls_of(run):
    """Return the names of the functions that a call enters, in order."""
    names = []

    def note(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(argument.__name__)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names[1:-1]


@pytest.mark.parametrize("state", ["measured", "skipped", "paused"])
def test_hot_path_does_nothing_twice(start, state):
    """Entries walk no frame and build no text; wrapped calls go through no context manager."""
    start(profiling_interval=1 if state == "measured" else 1000)
    model = Model()
    Detector.wrap_callables([CallableId(model, "step")], profile_cuda=False)

    def enter():
        with Detector.detection_section("s", profile_cuda=False):
            pass

    def call():
        model.step()

    for _ in range(3):  # the place of entry n is looked at if n is a power of two
        enter()
        call()
    if state == "paused":
        Detector.pause()
    wanted = {
        "measured": (
            "detection_section get __init__ __enter__ perf_counter __exit__ perf_counter append",
            "run is_dynamo_compiling perf_counter step perf_counter append",
        ),
        "skipped": (
            "detection_section get __enter__ __exit__",
            "run is_dynamo_compiling step",
        ),
        "paused": ("detection_section __enter__ __exit__", "run step"),
    }
    assert (" ".join(calls_of(enter)), " ".join(calls_of(call))) == wanted[state]


def test_the_clock_runs_inside_the_capture(start):
    """Kernel timing is on before the clock starts and until after it has stopped."""
    start()
    seen = []
    capture = types.SimpleNamespace(
        start=lambda: not seen.append("on"), stop=lambda: seen.append("off")
    )
    model = Model()
    Detector.wrap_callables([CallableId(model, "step")])
    Detector._registry.capture = capture

    def enter():
        with Detector.detection_section("s"):
            seen.append("body")

    enter()  # makes the section
    for run in (enter, model.step):
        order = [name for name in calls_of(run) if name in ("<lambda>", "perf_counter")]
        assert order == ["<lambda>", "perf_counter", "perf_counter", "<lambda>"]
    assert seen == ["on", "body", "off", "on", "body", "off", "on", "off"]
    Detector._registry.capture = None


def test_use_before_and_after_initialize(start):
    """Everything but shutdown is an error before initialize, and initialize is one twice."""
    with pytest.raises(RuntimeError), Detector.detection_section("s"):
        pass
    for call in (
        Detector.generate_report,
        Detector.generate_report_if_interval_elapsed,
        Detector.is_interval_elapsed,
        Detector.pause,
        lambda: Detector.wrap_callables([]),
    ):
        with pytest.raises(RuntimeError, match="initialize"):
            call()
    with pytest.raises(RuntimeError):
        Detector()
    Detector.shutdown()
    start()
    for kind in (AssertionError, RuntimeError):
        with pytest.raises(kind):
            start()
    assert Detector.initialized
    Detector.shutdown()
    start(report_time_interval=5)
    assert Detector.report_time_interval == 5


OPTIMIZED = """
from nvidia_resiliency_ext.attribution.straggler import Detector
Detector.initialize(cuda_profiling="off", control=False)
try:
    Detector.initialize()
except AssertionError as error:
    print("refused:", isinstance(error, RuntimeError))
"""


@pytest.mark.timeout(200)
def test_starting_twice_is_refused_without_assertions():
    """`python -O` drops assert statements, and this error is none."""
    result = subprocess.run(
        [sys.executable, "-O", "-c", OPTIMIZED],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert result.stdout == "refused: True\n", result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scores_to_compute": ["nonsense"]}, "nonsense"),
        ({"profiling_interval": 0}, "profiling_interval"),
        ({"report_time_interval": -1}, "report_time_interval"),
        ({"cuda_profiling": "maybe"}, "cuda_profiling"),
        ({"reference": 2.0}, "reference"),
        ({"reference": "worst"}, "reference"),
        ({"peer_groups": [[0, 1], [1]]}, "peer_groups"),
        *(({"exchange_timeout": value}, "exchange_timeout") for value in (0, math.inf, 1e12, "x")),
        ({"node_name": 5}, "node_name=5"),
        ({"peer_groups": ["ab"]}, "peer_groups"),
        ({"peer_groups": 5}, "peer_groups"),
        ({"gather_on_rank0": "no"}, "gather_on_rank0='no'"),
        ({"control": "no"}, "control='no'"),
        ({"process_group": 5}, "process_group=5"),
        ({"kernel_filter": 5}, "kernel_filter=5"),
        *(({"min_samples": value}, "min_samples") for value in (math.nan, 0, "x")),
        ({"best_decay": "x"}, "best_decay"),
        ({"reference": [1]}, "reference"),
        ({"scores_to_compute": []}, "scores_to_compute"),
        ({"scores_to_compute": 5}, "scores_to_compute"),
    ],
)
def test_wrong_arguments_leave_nothing_behind(start, options, named):
    """A wrong argument is a ConfigError that names it, and a second try works."""
    with pytest.raises(ConfigError, match=named):
        start(**options)
    assert not Detector.initialized
    start()


def test_a_section_needs_a_name_of_text(start):
    """A name that is no text is refused where it is given, not in a report."""
    start()
    with pytest.raises(TypeError, match="name=5: must be text"):
        Detector.detection_section(5)
    assert Detector.generate_report() is not None


def test_missing_extension_is_said_once_and_in_the_report(start, caplog, monkeypatch):
    """Without the extension sections are timed, one warning says why kernels are not."""
    monkeypatch.setitem(sys.modules, "nvrx_cupti_module", None)
    caplog.set_level(logging.WARNING)
    start(cuda_profiling="auto")
    with Detector.detection_section("s"):
        pass
    report = Detector.generate_report()
    assert report.cuda_profiling_status.startswith("unavailable: the extension")
    assert report.section_relative_perf_scores == {"s": {0: 1.0}}
    assert math.isnan(report.gpu_relative_perf_scores[0])
    assert "no kernel was captured" in report.nan_reasons["gpu"]
    assert "wrap the training step" not in report.nan_reasons["gpu"]
    assert len([r for r in caplog.records if "GPU kernels are not" in r.message]) == 1
    Detector.shutdown()
    with pytest.raises(RuntimeError, match="extension"):
        start(cuda_profiling="require")
    assert not Detector.initialized


def test_a_machine_without_a_gpu_is_told(start, monkeypatch):
    """Where CUPTI fails and torch has no GPU, the reason begins with that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def fail():
        raise RuntimeError("cuptiSubscribe failed: CUPTI_ERROR_UNKNOWN (error 999)")

    made = types.SimpleNamespace(initialize=fail)
    monkeypatch.setattr(kernel_capture, "CuptiManager", lambda **_: made)
    start(cuda_profiling="auto")
    with Detector.detection_section("s"):
        pass
    report = Detector.generate_report()
    assert report.cuda_profiling_status.startswith("unavailable: torch finds no GPU (cuptiSubscr")
    assert "sections are compared all the same" in report.nan_reasons["gpu"]
    assert str(report.explain(0)).startswith("rank 0 on ")


def test_nothing_measured_still_gives_a_report(start):
    """A report of nothing is a report, with the reason why it is empty."""
    start(gather_on_rank0=True)
    report = Detector.generate_report()
    assert bool(report) is True
    assert report.section_relative_perf_scores == {}
    assert "nothing was wrapped" in report.nan_reasons["sections"]
    assert report.identify_stragglers()["straggler_gpus_relative"] == set()
    assert "1 rank without a GPU score" in report.table()
