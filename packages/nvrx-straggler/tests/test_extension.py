# SPDX-License-Identifier: Apache-2.0
"""The extension `nvrx_cupti_module` over a fake libcupti."""

import gc
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import fake_cupti
import pytest

import nvidia_resiliency_ext
from nvidia_resiliency_ext.attribution.straggler import Detector, Statistic, _cupti_library
from nvidia_resiliency_ext.attribution.straggler.cupti import CuptiManager

extension = pytest.importorskip("nvrx_cupti_module", reason="the extension was not built")


@pytest.fixture(scope="session")
def library_path(tmp_path_factory):
    return fake_cupti.build(tmp_path_factory.mktemp("fake") / "libcupti_fake.so", "-shared")


@pytest.fixture
def fake(library_path, monkeypatch):
    monkeypatch.setenv("NVRX_CUPTI_LIBRARY", str(library_path))
    library = fake_cupti.load(library_path)
    library.fake_reset()
    yield library
    library.fake_reset()


@pytest.fixture
def profiler(fake):
    made = extension.CuptiProfiler(bufferSize=1 << 16, numBuffers=2, statsMaxLenPerKernel=100)
    made.initialize()
    yield made
    made.shutdown()


def key_of(kernel, name=None):
    text = name or f"void cutlass::Kernel_{kernel}_".ljust(180, "x")
    return f"{text}_blk_256_1_1_grid_{kernel + 1}_1_1"


@pytest.mark.parametrize("size", [144, 208, 216, 248])
def test_statistics_of_records_of_every_version(fake, profiler, size):
    """Records of every size give the right statistics, under name and launch shape."""
    fake.fake_record_size(size)
    profiler.start()
    assert fake.fake_run(0, 2, 2000, 10_000, 10) == 2000
    profiler.stop()
    assert fake.fake_run(0, 2, 5, 10_000, 10) == 0
    stats = profiler.get_stats()
    assert sorted(stats) == [key_of(0), key_of(1)]
    durations = [(10_000 + i * 10) / 1e3 for i in range(0, 2000, 2)]
    found, window = stats[key_of(0)], durations[-100:]
    assert (found.num_calls, found.total_calls) == (100, 1000)
    assert found.total_time_us == pytest.approx(sum(durations))
    assert (found.min, found.max) == (pytest.approx(window[0]), pytest.approx(window[-1]))
    assert found.median == pytest.approx(statistics.median(window))
    assert found.avg == pytest.approx(statistics.fmean(window))
    assert found.stddev == pytest.approx(statistics.pstdev(window))
    assert str(found).startswith("KernelStats(min=")
    assert profiler.get_stats()[key_of(0)].num_calls == 100
    profiler.reset()
    assert profiler.get_stats() == {}


def test_window_keeps_the_newest(fake):
    """Windows of any length hold the newest samples, across the ends of memory chunks."""
    for window in (1, 2, 30, 31, 32, 62, 63, 200):
        made = extension.CuptiProfiler(1 << 14, 2, window)
        made.initialize()
        made.start()
        for count in (window, 1, 3 * window + 1, 17):
            made.reset()
            fake.fake_run(0, 1, count, 1_000, 1_000)
            found = made.get_stats()[key_of(0)]
            kept = [float(i + 1) for i in range(count)][-window:]
            assert found.num_calls == len(kept)
            assert (found.min, found.max, found.avg) == (
                min(kept), max(kept), pytest.approx(statistics.fmean(kept))
            )  # fmt: skip
        made.shutdown()
        del made


def test_new_stats_are_empty_and_writable():
    """A KernelStats of one's own is NaN and zero, and can be written."""
    stats = extension.KernelStats()
    assert all(math.isnan(getattr(stats, n)) for n in ("min", "max", "median", "avg", "stddev"))
    assert stats.num_calls == 0
    stats.median, stats.num_calls = 2.5, 3
    assert (stats.median, stats.num_calls) == (2.5, 3)


def test_one_profiler_per_process(fake, profiler):
    """A second profiler is an error until the first is collected."""
    with pytest.raises(RuntimeError, match="exists already"):
        extension.CuptiProfiler()
    with pytest.raises(ValueError, match="bufferSize"):
        extension.CuptiProfiler(bufferSize=0)


def test_profiler_can_be_made_again(fake):
    """After the first profiler is collected another one works."""
    for _ in range(2):
        made = extension.CuptiProfiler(bufferSize=1 << 16)
        made.initialize()
        made.start()
        fake.fake_run(0, 1, 3, 5_000, 0)
        assert made.get_stats()[key_of(0)].num_calls == 3
        del made
        gc.collect()
    assert fake.fake_is_enabled() == 0


def test_repeated_calls_are_noticed_only(fake, profiler, capfd):
    """Repeated initialize, start and stop say so on stderr and do nothing; shutdown is final."""
    for call in (profiler.initialize, profiler.start, profiler.start, profiler.stop, profiler.stop):
        call()
    error = capfd.readouterr().err
    assert [error.count(text) for text in ("already init", "already started", "not started")] == [
        1, 1, 1,
    ]  # fmt: skip
    profiler.shutdown()
    assert fake.fake_forced_flushes() == 1
    for call in (profiler.start, profiler.stop, profiler.get_stats, profiler.reset):
        with pytest.raises(RuntimeError, match="not initialized"):
            call()
    profiler.initialize()


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        (b"subscribe", 39, "another CUPTI client is active"),
        (b"enable", 15, "cuptiActivityEnable failed: CUPTI_ERROR_NOT_INITIALIZED"),
        (b"enable", 999, "error 999"),
        (b"register", 7, "cuptiActivityRegisterCallbacks failed"),
    ],
)
def test_errors_of_cupti_are_named(fake, caplog, call, code, text):
    """What CUPTI refuses becomes one warning and the report's status, an error if required."""
    fake.fake_error(call, code)
    Detector.initialize(control=False)
    with Detector.detection_section("s"):
        pass
    report = Detector.generate_report()
    assert text in report.cuda_profiling_status
    assert len([r for r in caplog.records if "GPU kernels are not" in r.message]) == 1
    Detector.shutdown()
    with pytest.raises(RuntimeError, match="cannot be timed"):
        Detector.initialize(cuda_profiling="require")
    fake.fake_error(call, 0)
    Detector.initialize(cuda_profiling="require", control=False)


def test_dropped_and_foreign_buffers_are_counted(fake, profiler):
    """Records that found no buffer are counted; buffers of others and cut ones do no harm."""
    profiler.start()
    fake.fake_foreign()
    assert profiler.foreign_buffers == 1
    fake.fake_truncated()
    assert profiler.get_stats()[key_of(0)].num_calls == 1
    given = fake.fake_exhaust(10_000)
    assert given == (64 << 20) // (1 << 16)
    assert fake.fake_run(0, 1, 10, 1_000, 0) == 0
    fake.fake_release()
    assert profiler.dropped_records == 10
    assert fake.fake_run(0, 1, 10, 1_000, 0) == 10
    assert profiler.get_stats()[key_of(0)].num_calls == 11


def test_dropped_records_reach_the_report(fake):
    """The report counts the records that CUPTI dropped."""
    Detector.initialize(control=False)
    with Detector.detection_section("s"):
        fake.fake_run(0, 3, 30, 2_000, 0)
        fake.fake_dropped(5)
    report = Detector.generate_report()
    assert report.details[0].dropped_records == 5
    assert report.cuda_profiling_status == "ok"
    assert report.gpu_relative_perf_scores == {0: 1.0}
    assert list(report.local_kernel_summaries) == [key_of(i) for i in range(3)]
    assert Detector.generate_report().local_kernel_summaries == {}


def test_reused_name_pointer_is_another_kernel(fake, profiler):
    """A name whose memory is reused by another module's kernel counts as another kernel."""
    profiler.start()
    fake.fake_run(9, 1, 3, 1_000, 0)
    profiler.get_stats()
    fake.fake_rename(9, b"another_kernel")
    fake.fake_run(9, 1, 2, 1_000, 0)
    stats = profiler.get_stats()
    assert stats[key_of(9)].num_calls == 3
    assert stats[key_of(9, "another_kernel")].num_calls == 2
    fake.fake_rename(9, key_of(9)[:180].encode())


def test_records_without_times_are_skipped(fake, profiler):
    """A record whose start or end is 0 is no sample."""
    profiler.start()
    fake.fake_run(0, 1, 4, -1, 0)
    fake.fake_run(0, 1, 4, -1000, 0)  # from 1000 to 0
    assert profiler.get_stats() == {}


@pytest.mark.parametrize(
    ("call", "slow"),
    [
        ("get_stats", "flush"),
        ("reset", "flush"),
        ("shutdown", "flush"),
        ("start", "switch"),
        ("stop", "switch"),
    ],
)
def test_other_threads_run_during_a_slow_call(fake, profiler, call, slow):
    """While CUPTI flushes or switches capture, other Python threads go on."""
    if call == "stop":
        profiler.start()
    make_slow = getattr(fake, f"fake_{slow}_ms")
    ticks, ended = [], threading.Event()

    def tick():
        while not ended.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    make_slow(1000)
    begin = time.monotonic()
    getattr(profiler, call)()
    end = time.monotonic()
    make_slow(0)
    ended.set()
    thread.join()
    assert end - begin >= 1.0
    assert sum(begin < t < end for t in ticks) >= 3


def test_kernels_of_nested_sections_are_captured(fake):
    """Capture lasts from the first to the last of nested sections, and wrapped calls have it."""
    Detector.initialize(control=False)
    assert isinstance(Detector.cupti_manager, CuptiManager)
    with Detector.detection_section("outer"):
        with Detector.detection_section("inner"):
            fake.fake_run(0, 1, 1, 1_000, 0)
        fake.fake_run(1, 1, 1, 1_000, 0)
        with Detector.detection_section("cpu", profile_cuda=False):
            fake.fake_run(2, 1, 1, 1_000, 0)
    with pytest.raises(KeyError), Detector.detection_section("raises"):
        raise KeyError
    assert fake.fake_run(3, 1, 1, 1_000, 0) == 0
    assert Detector.cupti_manager.started_cnt == 0
    names = Detector.generate_report().local_kernel_summaries
    assert list(names) == [key_of(0), key_of(1), key_of(2)]


def test_the_detector_keeps_8192_samples_of_a_kernel(fake):
    """The window of a kernel holds its newest 8192 samples; all calls count for its weight."""
    Detector.initialize(control=False)
    with Detector.detection_section("s"):
        fake.fake_run(0, 1, 9000, 1_000, 0)
    report = Detector.generate_report()
    assert report.local_kernel_summaries[key_of(0)][Statistic.NUM] == 8192
    assert report.details[0].compute_us == pytest.approx(9000.0)


def test_manager_counts_starts(fake):
    """Starts and stops nest; too many stops and use before initialize are errors."""
    manager = CuptiManager()
    for call in (manager.start_profiling, manager.stop_profiling, manager.get_results):
        with pytest.raises(RuntimeError):
            call()
    manager.initialize()
    manager.start_profiling()
    manager.start_profiling()
    manager.stop_profiling()
    assert fake.fake_is_enabled() == 1
    manager.stop_profiling()
    assert fake.fake_is_enabled() == 0
    with pytest.raises(RuntimeError, match="not started"):
        manager.stop_profiling()
    manager.shutdown()


def test_torch_profiler_is_stepped_aside_for(fake, monkeypatch):
    """While torch.profiler runs kernels are not captured; afterwards callbacks are ours again."""
    from torch.autograd import profiler as torch_profiler

    Detector.initialize(control=False)
    monkeypatch.setattr(torch_profiler, "_is_profiler_enabled", True)
    with Detector.detection_section("s"):
        assert fake.fake_is_enabled() == 0
    fake.fake_steal()
    report = Detector.generate_report()
    assert report.cuda_profiling_status == "paused: torch.profiler"
    monkeypatch.setattr(torch_profiler, "_is_profiler_enabled", False)
    with Detector.detection_section("s"):
        fake.fake_run(0, 1, 2, 1_000, 0)
    report = Detector.generate_report()
    assert report.cuda_profiling_status == "ok"
    assert report.local_kernel_summaries[key_of(0)]


def test_torch_tells_that_its_profiler_runs():
    """The flag by which torch.profiler is noticed is set while it runs."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch.autograd.profiler._is_profiler_enabled
    assert not torch.autograd.profiler._is_profiler_enabled


def test_memory_is_bounded(fake):
    """Five thousand kernels with 200 samples take at most 8 MB, more kernels than allowed none."""
    made = extension.CuptiProfiler(1 << 20, 2, 200, maxKernels=5000)
    made.initialize()
    made.start()
    fake.fake_run(0, 6000, 6000 * 210, 1_000, 1)
    stats = made.get_stats()
    assert len(stats) == 5000
    assert stats[key_of(0)].num_calls == 200
    assert made.memory_bytes <= 8_000_000
    made.shutdown()


EXITS = """
import ctypes, os, sys, nvrx_cupti_module
library = ctypes.CDLL(os.environ["NVRX_CUPTI_LIBRARY"])
library.fake_run.argtypes = [ctypes.c_int] * 3 + [ctypes.c_int64] * 2
profiler = nvrx_cupti_module.CuptiProfiler(bufferSize=1 << 16)
profiler.initialize()
profiler.start()
library.fake_run(0, 3, 1000, 1000, 0)
if os.fork() == 0:
    try:
        profiler.get_stats()
    except RuntimeError as error:
        os._exit(0 if "not initialized" in str(error) else 3)
    os._exit(4)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
if sys.argv[1] == "late":
    del profiler
    library.fake_run(0, 3, 1000, 1000, 0)
    library.fake_foreign()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["capturing", "late"])
def test_process_ends_with_capture_on(fake, how):
    """A process that ends while it captures does not crash; a forked child is not initialised."""
    result = subprocess.run(
        [sys.executable, "-c", EXITS, how], capture_output=True, text=True, timeout=180, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_library_is_that_of_torch(tmp_path, monkeypatch):
    """The loaded library comes first, then torch's wheel, and never another major version."""
    monkeypatch.setattr(_cupti_library, "_wheel_roots", lambda: [str(tmp_path)])
    for folder, major in (("cuda_cupti/lib", 12), ("cu13/lib", 13)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"libcupti.so.{major}").touch()
    home = tmp_path / "home" / "extras" / "CUPTI" / "lib64"
    home.mkdir(parents=True)
    (home / "libcupti.so.12").touch()
    found = _cupti_library.candidates("12.8", {"CUDA_HOME": str(tmp_path / "home")})
    assert found == [
        ("libcupti.so.12", True),
        (f"{tmp_path}/cuda_cupti/lib/libcupti.so.12", False),
        ("libcupti.so.12", False),
        (f"{home}/libcupti.so.12", False),
    ]
    assert _cupti_library.candidates("12.8", {"NVRX_CUPTI_LIBRARY": "/x"}) == [("/x", False)]
    found = _cupti_library.candidates("13.0", {})
    assert not any("libcupti.so.12" in name for name, _ in found)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [b"absent.so", b"absent-\xff.so"], ids=["text", "bytes"])
def test_missing_library_is_a_clear_error(tmp_path, name):
    """A library that is not there is an error that names it and the variable, whatever its name."""
    program = "import nvrx_cupti_module as m; m.CuptiProfiler().initialize()"
    env = {**os.environ, "NVRX_CUPTI_LIBRARY": str(tmp_path / os.fsdecode(name))}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=180, env=env, check=False,
    )  # fmt: skip
    last = result.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: no usable libcupti was found")
    assert "absent" in last
    assert "NVRX_CUPTI_LIBRARY" in last


CUDA_FOLDERS = [
    Path(folder)
    for folder in (os.environ.get("NVRX_TEST_CUDA") or "").split(":")
    + sorted(map(str, Path("/usr/local").glob("cuda-*")))
    if folder and (Path(folder) / "include" / "cupti.h").exists()
]
needs_cuda = pytest.mark.skipif(
    not CUDA_FOLDERS, reason="no headers of CUPTI: none in /usr/local/cuda-*, NVRX_TEST_CUDA unset"
)


@needs_cuda
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("folder", CUDA_FOLDERS, ids=lambda folder: folder.name)
def test_records_are_laid_out_as_in_the_real_headers(tmp_path, folder):
    """Our record fits each version of the kernel record that the headers declare, from 4 on."""
    headers = (folder / "include").glob("cupti_activity*.h")
    found = {
        int(number)
        for header in headers
        for number in re.findall(r"^} CUpti_ActivityKernel(\d+);", header.read_text(), re.MULTILINE)
    }
    versions = sorted(number for number in found if number >= 4)
    assert versions
    for number in versions:
        fake_cupti.build(
            tmp_path / f"offsets{number}",
            f"-I{folder / 'include'}",
            f"-DNVRX_RECORD=CUpti_ActivityKernel{number}",
            sources=(fake_cupti.NATIVE / "offsets.cpp",),
        )


@needs_cuda
@pytest.mark.timeout(200)
@pytest.mark.parametrize("folder", CUDA_FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="has a driver")
def test_real_library_without_a_driver_is_a_clear_error(folder):
    """The real libcupti without a GPU raises an error with its own text, and ends cleanly."""
    library = next((folder / "lib").glob("libcupti.so.1?"), None)
    if library is None:
        pytest.skip(f"no libcupti in {folder}")
    program = "import nvrx_cupti_module as m; m.CuptiProfiler().initialize()"
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "NVRX_CUPTI_LIBRARY": str(library)},
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert re.match(r"RuntimeError: cupti\w+ failed: .*error \d+", result.stderr.splitlines()[-1])


def test_extension_needs_nothing_but_the_c_library():
    """No libcupti, CUDA or C++ library is linked: it loads on every machine."""
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    result = subprocess.run(
        ["readelf", "-d", extension.__file__],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    needed = re.findall(r"\(NEEDED\).*\[(\w+)", result.stdout)
    assert needed
    assert {name.partition("-")[0] for name in needed} <= {"libc", "libm", "libdl", "ld",
                                                          "libpthread"}  # fmt: skip


LOADS = """
import sys
sys.path[:0] = sys.argv[1:]
import nvrx_cupti_module
stats = nvrx_cupti_module.KernelStats()
stats.median, stats.num_calls = 2.5, 3
profiler = nvrx_cupti_module.CuptiProfiler(bufferSize=1 << 16)
try:
    profiler.initialize()
except RuntimeError as error:
    print(str(error)[:27])
from nvidia_resiliency_ext.attribution.straggler import _cli
print(*sys.version_info[:2], stats, _cli.main(["status", "--run-dir", "/absent"]))
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_one_binary_loads_on_each_python(minor):
    """The extension, and what goes without torch, loads on each Python that this machine has."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [shutil.which(f"python3.{minor}"), *pyenv.glob(f"3.{minor}.*/bin/python")]
    ask = ["-c", "import sys; print(*sys.version_info[:2])"]
    pythons = [
        python
        for python in filter(None, found)
        # What pyenv puts into the path may name a Python that is switched off.
        if subprocess.run([python, *ask], capture_output=True, text=True, timeout=60, check=False)
        .stdout.strip() == f"3 {minor}"
    ]  # fmt: skip
    if not pythons:
        pytest.skip(f"no Python 3.{minor} here")
    folders = [str(Path(extension.__file__).parent)]
    folders += [str(Path(folder).parent) for folder in nvidia_resiliency_ext.__path__]
    result = subprocess.run(
        [pythons[0], "-c", LOADS, *folders],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.stdout.splitlines() == [
        "no usable libcupti was foun",
        f"3 {minor} KernelStats(min=nan, max=nan, median=2.5, avg=nan, stddev=nan, num_calls=3) 2",
    ], result.stderr


def test_cupti_is_never_finalized():
    """The extension does not know the call that would end CUPTI for the process's other clients."""
    code = Path(extension.__file__).read_bytes()
    assert b"cuptiActivityFlushAll" in code
    assert b"cuptiFinalize" not in code


@pytest.fixture
def build_hook(monkeypatch):
    pytest.importorskip("hatchling")
    monkeypatch.syspath_prepend(fake_cupti.SOURCES.parent)
    import hatch_build

    return hatch_build


def test_build_fails_with_one_line_or_goes_without(build_hook, tmp_path, monkeypatch):
    """A compiler that fails ends the build and names the variable; with that nothing is built."""
    shutil.copytree(fake_cupti.SOURCES, tmp_path / "cpp")
    (tmp_path / "src").mkdir()
    made = build_hook.CuptiExtensionHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel")
    for compiler in ("/no/such/compiler", shutil.which("false")):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(RuntimeError) as failed:
            made.initialize("standard", {})
        assert f"{build_hook.SKIP}=1" in str(failed.value)
        assert "\n" not in str(failed.value)
    for value in ("1", "on", "YES", "true"):
        monkeypatch.setenv(build_hook.SKIP, value)
        made.initialize("standard", {})
    assert list((tmp_path / "src").iterdir()) == []


def build_core(tmp_path, *flags):
    """Compile the fake and the core; return both libraries."""
    library = fake_cupti.build(tmp_path / "libcupti_fake.so", "-shared", *flags)
    sources = tuple(fake_cupti.SOURCES / name for name in ("capture.cpp", "kernel_table.cpp"))
    core = tmp_path / "libcore.so"
    return library, fake_cupti.build(core, "-shared", *flags, sources=sources)


def run_native(tmp_path, program, libraries, *flags):
    """Compile a test program for the core, run it, and return what it printed."""
    library, core = libraries
    sources = (fake_cupti.NATIVE / program, core, library)
    built = fake_cupti.build(tmp_path / "program", *flags, sources=sources)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "ASAN_OPTIONS": "detect_leaks=0"}
    result = subprocess.run(
        [built, library], capture_output=True, text=True, timeout=280, env=env, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sanitizer", "programs"),
    [("address", ["stress.cpp", "no_memory.cpp"]), ("thread", ["stress.cpp"])],
    ids=["address", "thread"],
)
def test_core_under_sanitizers(tmp_path, sanitizer, programs):
    """Capture from many threads, with late and foreign buffers, is clean under a sanitizer.

    Nor does an allocation that fails in a callback end the process: its record counts as dropped.
    """
    flag = f"-fsanitize={sanitizer}"
    core = build_core(tmp_path, flag)
    for program in programs:
        assert run_native(tmp_path, program, core, flag).startswith("done"), program


EXERCISES = """
import ctypes, os, sys, threading
sys.path[:0] = sys.argv[1:]
import nvrx_cupti_module
library = ctypes.CDLL(os.environ["NVRX_CUPTI_LIBRARY"])
library.fake_run.argtypes = [ctypes.c_int] * 3 + [ctypes.c_int64] * 2
library.fake_error.argtypes = [ctypes.c_char_p, ctypes.c_int]
found = []

def read():
    for _ in range(50):
        found.extend(profiler.get_stats().items())
        profiler.reset()

def launch():
    for number in range(50):
        library.fake_run(number % 7, 40, 300, 1000, 1)
        library.fake_foreign()

for life in range(2):
    profiler = nvrx_cupti_module.CuptiProfiler(bufferSize=1 << 14, numBuffers=2)
    library.fake_error(b"enable", 15)
    try:
        profiler.initialize()
    except RuntimeError:
        library.fake_error(b"enable", 0)
    profiler.initialize()
    profiler.start()
    threads = [threading.Thread(target=run) for run in (read, read, launch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library.fake_run(0, 3, 10, 1000, 1)
    found.extend(profiler.get_stats().items())
    print(found[-1][1].num_calls > 0, profiler.memory_bytes > 0, os.path.dirname(profiler.library))
    if os.fork() == 0:
        os._exit(bool(profiler.library))
    assert os.wait()[1] == 0
    if life == 0:
        del profiler
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_extension_in_python_under_sanitizers(build_hook, tmp_path, sanitizer):
    """Threads, errors, a fork and an exit with capture on are clean under a sanitizer in Python.

    Python takes each object from malloc, so that the sanitizer sees what is used after its end.
    """
    flag = f"-fsanitize={sanitizer}"
    build_hook.compile_extension(
        fake_cupti.SOURCES.parent, tmp_path / build_hook.NAME, (flag, "-g")
    )
    library = fake_cupti.build(tmp_path / "libcupti_fake.so", "-shared", flag)
    preloaded = [
        subprocess.run(
            ["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in (f"lib{sanitizer[0]}san.so", "libstdc++.so.6")
    ]
    folders = [str(Path(folder).parent) for folder in nvidia_resiliency_ext.__path__]
    env = {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "NVRX_CUPTI_LIBRARY": str(library),
    }
    result = subprocess.run(
        [sys.executable, "-c", EXERCISES, str(tmp_path), *folders],
        capture_output=True, text=True, timeout=280, env=env, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"True True {tmp_path}"] * 2
