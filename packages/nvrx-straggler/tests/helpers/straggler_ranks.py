# SPDX-License-Identifier: Apache-2.0
"""Runs functions of this module as ranks of a gloo job; each puts what it found in a queue."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import queue
import tempfile
import time
import types
import zlib
from multiprocessing.connection import wait as wait_for_sentinels
from pathlib import Path

import torch
import torch.distributed as dist

from nvidia_resiliency_ext.attribution import straggler
from nvidia_resiliency_ext.attribution.straggler import (
    Detector,
    Statistic,
    dist_utils,
    interval_tracker,
)
from nvidia_resiliency_ext.attribution.straggler._cli import main
from nvidia_resiliency_ext.attribution.straggler.reporting import ReportGenerator, ScoringOptions

DEADLINE_S = 170.0
_context = multiprocessing.get_context("forkserver")


def _use_a_short_folder() -> None:
    """Let multiprocessing keep its socket in /tmp: TMPDIR may be too long for one."""
    chosen, tempfile.tempdir = tempfile.tempdir, "/tmp"
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = chosen


_use_a_short_folder()
# The server does not have the test's sys.path, so it cannot load this module.
_context.set_forkserver_preload(
    ["torch.distributed", "nvidia_resiliency_ext.attribution.straggler._session.session"]
)


def run(function, world_size: int, folder: Path, *args) -> list:
    """Return what the function returns on each rank, by rank; it gets `rank` and the arguments."""
    results = _context.Queue()
    store = str(folder / f"store-{time.monotonic_ns()}")
    ranks = [
        _context.Process(
            target=_run_rank, args=(function, rank, world_size, store, results, args), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found = {}
    deadline = time.monotonic() + DEADLINE_S
    try:
        while len(found) < world_size:
            rank, ok, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
            assert ok, f"rank {rank}: {value}"
            found[rank] = value
    except queue.Empty:
        raise AssertionError(f"only ranks {sorted(found)} answered") from None
    finally:
        wait_for_sentinels([p.sentinel for p in ranks], timeout=1.0)
        for process in ranks:
            process.kill()
            process.join()
            process.close()
        results.close()
        results.join_thread()
    return [found[rank] for rank in range(world_size)]


def _run_rank(function, rank, world_size, store, results, args):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        value = function(rank, *args)
        results.put((rank, True, value))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - the test shows it
        results.put((rank, False, repr(error)))
    results.close()
    results.join_thread()


def summary(median: float, count: int = 10) -> dict:
    """Return the summary of samples that are all alike."""
    values = dict.fromkeys((Statistic.MIN, Statistic.MAX, Statistic.MED, Statistic.AVG), median)
    return {**values, Statistic.STD: 0.0, Statistic.NUM: count}


def slower_by_rank(rank, gather):
    """Rank r takes (r + 1) times as long; its own kernel and section are on no other rank."""
    generator = ReportGenerator("all", gather_on_rank0=gather, node_name=f"node{rank}")
    kernels = {
        "gemm": summary(10.0 * (rank + 1)),
        "ncclDevKernel_AllReduce": summary(500.0 / (rank + 1)),
        f"only_on_{rank}": summary(3.0),
    }
    sections = {"step": summary(2.0 * (rank + 1)), f"section{rank}": summary(1.0)}
    report = generator.generate_report(sections, kernels)
    again = generator.generate_report(sections, kernels)
    return (
        None if report is None else pickle.loads(pickle.dumps(report)),
        None if again is None else again.to_dict(),
        dict(generator.name_mapper.kernel_name_to_id),
    )


def without_pickle(rank):
    """A report with new names, in a process in which nothing can be pickled."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("pickle was used between ranks")

    generator = ReportGenerator("all", node_name="n")
    # Those of torch.distributed are its own names for the classes of pickle.
    places = [(pickle, name) for name in ("loads", "dumps", "Pickler", "Unpickler")]
    places += [(dist.distributed_c10d, name) for name in ("_pickler", "_unpickler")]
    kept = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, refuse)
    try:
        report = generator.generate_report({"s": summary(1.0)}, {"k": summary(1.0 + rank)})
    finally:
        for (module, name), value in zip(places, kept, strict=True):
            setattr(module, name, value)
    return None if report is None else dict(report.gpu_relative_perf_scores)


def nothing_in_common(rank, measured):
    """Each rank has one kernel of its own, or none at all where it is not among `measured`."""
    generator = ReportGenerator("all", gather_on_rank0=False)
    kernels = {f"kernel{rank}": summary(1.0)} if rank in measured else {}
    report = generator.generate_report({}, kernels)
    return report.gpu_relative_perf_scores[rank], dict(report.nan_reasons)


def count_collectives():
    """Return a list that grows by one with each collective of this process."""
    called = []
    dist_utils.waiting.set(called.append)
    return called


def collectives_of_reports(rank):
    """Count collectives of the first report, of steady ones, and with one new kernel somewhere.

    The ranks have the same kernels, in an order of their own.
    """
    generator = ReportGenerator("all", node_name="n")
    counts = []
    called = count_collectives()
    order = range(50) if rank == 0 else reversed(range(50))
    kernels = {f"k{i}": summary(1.0) for i in order}
    for number in range(4):
        called.clear()
        if number == 3 and rank == 1:
            kernels["new"] = summary(1.0)
        generator.generate_report({"s": summary(1.0)}, kernels)
        counts.append(len(called))
    return counts


def bytes_of_names(rank):
    """Return the bytes of names that are exchanged when two ranks of three have the same new ones,
    and then when one rank has one more.
    """
    generator = ReportGenerator("all", node_name="n")
    sent = []
    all_reduce = dist_utils.all_reduce

    def note(tensor, **options):
        if tensor.dtype == torch.uint8:
            sent.append(len(tensor))
        return all_reduce(tensor, **options)

    dist_utils.all_reduce = note
    names = [f"{'shared' if rank < 2 else 'own'}{i}" for i in range(100)]
    for more in ([], ["new"] if rank == 1 else []):
        generator.generate_report({}, {name: summary(1.0) for name in [*names, *more]})
    dist_utils.all_reduce = all_reduce
    packed = zlib.compress(straggler.name_mapper.encode_names(names, []), 1)
    return sent, len(packed)


def individual_alone(rank):
    """Report individual scores of this rank only; returns collectives and numbered names."""
    called = count_collectives()
    generator = ReportGenerator("individual_perf_scores", gather_on_rank0=False)
    report = generator.generate_report({"s": summary(1.0)}, {f"k{rank}": summary(1.0)})
    assert report.gpu_individual_perf_scores == {rank: 1.0}
    return len(called), generator.name_mapper.kernel_counter


def every_collective(rank):
    """Return what each helper around torch.distributed gives."""
    from nvidia_resiliency_ext.attribution.straggler import dist_utils

    tensor = torch.tensor([1.0 + rank])
    gathered = dist_utils.gather_on_rank0(tensor)
    total = tensor.clone()
    dist_utils.all_reduce(total)
    return (
        dist_utils.get_world_size(),
        dist_utils.get_device_for_backend().type,
        dist_utils.all_gather_object(f"rank {rank}"),
        total.tolist(),
        None if gathered is None else [item.tolist() for item in gathered],
        (dist_utils.is_all_true(True), dist_utils.is_all_true(rank == 0)),
    )


def initialized_before_the_group(rank):
    """Make a detector and a generator while there is no process group, and report with both.

    Returns nodes, and whether the detector has a group of its own.
    """
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # the other rank is connected, too
    dist.destroy_process_group()
    generator = ReportGenerator("all", node_name=f"node{rank}")
    Detector.initialize(cuda_profiling="off", control=False, node_name=f"node{rank}")
    with Detector.detection_section("s"):
        pass
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    report = Detector.generate_report()
    has_own_group = Detector.reporter.group not in (None, dist.group.WORLD)
    Detector.shutdown()
    direct = generator.generate_report({"s": summary(1.0)}, {})
    assert (generator.rank, generator.world_size, direct is None) == (rank, 2, rank == 1)
    return None if report is None else dict(report.rank_to_node), has_own_group


def restarted_rank(rank):
    """Rank 1 loses its tables after the first report, as a restarted process would."""
    generator = ReportGenerator("all", node_name=f"node{rank}")
    kernels = {"a": summary(1.0 + rank), "b": summary(2.0 + 2 * rank)}
    generator.generate_report({}, kernels)
    before = dict(generator.name_mapper.kernel_name_to_id)
    if rank == 1:
        generator = ReportGenerator("all", node_name="moved")
        kernels = {"b": kernels["b"], "c": summary(9.0), "a": kernels["a"]}
    report = generator.generate_report({}, kernels)
    scores = None if report is None else dict(report.gpu_relative_perf_scores)
    nodes = None if report is None else dict(report.rank_to_node)
    return before, dict(generator.name_mapper.kernel_name_to_id), scores, nodes


def broken_data(rank, part):
    """Rank 1 cannot read its summaries or compute scores; the others are compared without it."""
    generator = ReportGenerator("all", node_name=f"node{rank}")
    kernels = {"k": summary(1.0 if rank == 0 else 2.0)}
    if rank == 1 and part == "summaries":
        kernels = {"k": 7}
    elif rank == 1:
        generator._score = lambda *_: 1 / 0
    report = generator.generate_report({}, kernels)
    return None if report is None else (
        dict(report.gpu_relative_perf_scores), str(report.explain(1)[0])
    )  # fmt: skip


def with_options(rank, options, medians):
    """Report with scoring options; `medians[rank]` is a kernel's median, None for not measured."""
    generator = ReportGenerator("all", gather_on_rank0=False, options=ScoringOptions(**options))
    kernels = {} if medians[rank] is None else {"k": summary(medians[rank])}
    return generator.generate_report({}, kernels).gpu_relative_perf_scores[rank]


def many_names(rank, count):
    """More names than the first collective carries, half of them with characters beyond ASCII."""
    generator = ReportGenerator("all", node_name="n")
    kernels = {f"kernel{i}é{'x' * (i % 40)}": summary(1.0 + (rank == 1)) for i in range(count)}
    generator.options = ScoringOptions(max_kernels=count)
    report = generator.generate_report({}, kernels)
    return None if report is None else dict(report.gpu_relative_perf_scores)


def names_without_end(rank, own):
    """Report windows of 15 new kernels each, and `own` ones of rank 0, where 20 names are many."""
    from nvidia_resiliency_ext.attribution.straggler import name_mapper
    from nvidia_resiliency_ext.attribution.straggler._exchange import generator as generator_module

    name_mapper.MAX_NAMES = generator_module.MAX_NAMES = 20
    generator = ReportGenerator("all", node_name="n")
    scores, counts = [], []
    for window in range(6):
        names = [f"w{window}k{i}" for i in range(15)]
        names += [f"w{window}own{i}" for i in range(own if rank == 0 else 0)]
        report = generator.generate_report({}, {name: summary(1.0 + rank) for name in names})
        scores.append(None if report is None else dict(report.gpu_relative_perf_scores))
        counts.append(generator.name_mapper.kernel_counter)
    return scores if rank == 0 else [None] * 6, counts


def malformed_names(rank):
    """Rank 1 sends bytes that are no names; both ranks refuse them alike."""
    from nvidia_resiliency_ext.attribution.straggler import name_mapper

    if rank == 1:
        name_mapper.encode_names = lambda *_: b"\x05\0\0\0\0\0\0\0\xff\xff\xff\xff"
    try:
        straggler.name_mapper.NameMapper().gather_and_assign_ids([f"k{rank}"], [])
    except ValueError as error:
        return type(error).__name__
    return "accepted"


def detector_in_steps(rank, steps):
    """A training loop with reports; rank 1 is slow in its section."""
    Detector.initialize(
        report_time_interval=0.0, profiling_interval=2, cuda_profiling="off", node_name=f"n{rank}"
    )
    due, texts = [], []
    for _ in range(steps):
        with Detector.detection_section("step", profile_cuda=False):
            pass
        samples = Detector.custom_sections["step"].cpu_elapsed_times
        samples.extend([4.0 if rank == 1 else 1.0] * 3)  # so the median is this, on any machine
        report = Detector.generate_report_if_interval_elapsed()
        due.append(Detector.is_interval_elapsed())
        if report is not None:
            texts.append(report.identify_stragglers()["straggler_sections_relative"])
    Detector.shutdown()
    Detector.shutdown()
    return due, texts


def missing_peer(rank):
    """Rank 1 comes late to one report: rank 0 goes on, and both find together again."""
    Detector.initialize(cuda_profiling="off", control=False)
    store = dist.distributed_c10d._get_default_store()
    found = []
    for number in range(4):
        with Detector.detection_section("s"):
            pass
        if (number, rank) == (1, 1):
            store.wait(["rank0-skipped"])
        if number:  # only the report that rank 1 misses is given up soon
            is_missed = (number, rank) == (1, 0)
            Detector._session._worker._timeout_s = 1.0 if is_missed else DEADLINE_S
        report = Detector.generate_report()
        found.append(report is not None)
        if number == 1 and rank == 0:
            store.set("rank0-skipped", "1")
        if number == 1:
            # Rank 0's contribution is taken up by rank 1; then both are level again.
            store.set(f"level{rank}", "1")
            store.wait([f"level{1 - rank}"])
            Detector._session._worker._last._done.wait(DEADLINE_S)
    Detector.shutdown()
    return found


class _Announced(logging.Handler):
    """Sets a key of the store with the first warning that holds a text."""

    def __init__(self, text, store, key):
        super().__init__(logging.WARNING)
        self._text, self._store, self._key = text, store, key
        logging.getLogger("nvrx").addHandler(self)

    def emit(self, record):
        if self._text in record.getMessage():
            self._store.set(self._key, "1")


def late_at(rank, late_step, steps, in_step):
    """Rank 1 comes too late to one iteration, in which rank 0 waits for 0.5 s only.

    Returns when reports were due, the intervals, and which announcements of this rank are left.

    Each rank has a clock of its own: rank 0 takes 1 s per step, rank 1 half of it, and both four
    times as long from step 18 on. Ranks end each step together if `in_step`; else rank 1 comes
    when rank 0 has ended the last one.
    """
    store = dist.distributed_c10d._get_default_store()
    Detector.initialize(cuda_profiling="off", control=False, report_time_interval=10.0)
    if rank == 0 and in_step:
        _Announced("not joined", store, "rank0-waited")
    Detector._session._submit(lambda _: None, is_collective=True)._done.wait(
        DEADLINE_S
    )  # ranks have met
    worker = Detector._session._worker
    submit = worker.submit

    def submit_for_a_while(run):
        exchange = submit(run)
        if (rank, step) == (0, late_step):
            exchange.deadline = time.monotonic() + 0.5
        return exchange

    worker.submit = submit_for_a_while
    now = 0.0
    interval_tracker.time = types.SimpleNamespace(monotonic=lambda: now)
    due, intervals = [], set()
    for step in range(1, steps + 1):
        now += (1.0 if rank == 0 else 0.5) * (4.0 if step > 18 else 1.0)
        if step == late_step and rank == 1:
            store.wait(["rank0-waited"])
        Detector.generate_report_if_interval_elapsed()
        if Detector.is_interval_elapsed():
            due.append(step)
        intervals.add(Detector.report_interval_tracker.iter_interval)
        if in_step:
            store.set(f"{step}/{rank}", "1")
            store.wait([f"{step}/{1 - rank}"])
    store.set(f"rank{rank}-waited", "1")
    worker._last._done.wait(DEADLINE_S)
    keys = worker._peers._store
    Detector.shutdown()
    stages = range(1, worker._number + 1)
    left = [stage for stage in stages if keys.check([f"{stage}/{rank}"])]
    store.set(f"done{rank}", "1")
    store.wait([f"done{1 - rank}"])
    return due, sorted(intervals - {None}), left


class _Log(logging.Handler):
    """Keeps the lines of the log that are warnings or worse."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger("nvrx").addHandler(self)

    def emit(self, record):
        self.lines.append(self.format(record))


def never_there(rank, absent, calls, kinds):
    """Ranks in `absent` never report; returns the lines of the log, and whether all calls ended."""
    log = _Log()
    Detector.initialize(
        cuda_profiling="off", exchange_timeout=5, control=False, report_time_interval=0.0
    )
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank not in absent:
        for _ in range(calls):
            if kinds == "scheduled":
                Detector.generate_report_if_interval_elapsed()
            else:
                Detector.generate_report()
        store.set(f"ended{rank}", "1")
    store.wait([f"ended{peer}" for peer in range(dist.get_world_size()) if peer not in absent])
    Detector.shutdown()
    return log.lines


def different_options(rank, options):
    """Each rank has options of its own; returns the lines of the log."""
    log = _Log()
    Detector.initialize(cuda_profiling="off", control=False, **options[rank])
    assert Detector.generate_report() is None
    assert Detector.generate_report() is None
    Detector.shutdown()
    return log.lines


def written_by_others(rank, key, value):
    """Another client of the store writes what ranks compare; returns the lines of the log."""
    log = _Log()
    store = dist.PrefixStore("nvrx-straggler//0", dist.distributed_c10d._get_default_store())
    if rank == 0:
        store.set(key, value)
    dist.barrier()
    Detector.initialize(cuda_profiling="off", control=False)
    assert Detector.generate_report() is None
    Detector.shutdown()
    return log.lines


def in_a_forked_child(rank):
    """Report in a child of each rank, then here; returns the child's error, and if it worked."""
    Detector.initialize(cuda_profiling="off", control=False)
    Detector.generate_report()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Detector.generate_report()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        Detector.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child shuts down like any other"
    os.close(writer)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    report = Detector.generate_report()
    Detector.shutdown()
    return said, os.getpid(), report is not None


def new_process_groups(rank):
    """Report in three worlds, with one or two detectors in each, one of which spans two worlds.

    Rank 1 does not report with the first detector.
    """
    store = dist.distributed_c10d._get_default_store()
    found = []
    for world in range(3):
        if world:
            dist.destroy_process_group()
            again = dist.PrefixStore(f"world{world}", store)
            dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
        for number in range(2):
            if not Detector.initialized:
                timeout = 0.5 if (world, number) == (0, 0) else 60.0
                Detector.initialize(cuda_profiling="off", control=False, exchange_timeout=timeout)
            if (world, number, rank) != (0, 0, 1):
                found.append(Detector.generate_report() is not None)
            if number == 0:
                dist.barrier()
                Detector.shutdown()
    Detector.shutdown()
    return found


def swapped_ranks(rank):
    """Report before and after ranks 1 and 2 have changed places; returns the nodes of both."""
    store = dist.distributed_c10d._get_default_store()
    Detector.initialize(cuda_profiling="off", control=False, node_name=f"node{rank}")
    reports = [Detector.generate_report()]
    dist.barrier()
    dist.destroy_process_group()
    swapped = dist.PrefixStore("swapped", store)
    now = (0, 2, 1)[rank]
    dist.init_process_group("gloo", store=swapped, rank=now, world_size=3)
    reports.append(Detector.generate_report())
    Detector.shutdown()
    return [report and dict(report.rank_to_node) for report in reports]


def group_then_all(rank):
    """Ranks 0 and 1 report in a group of theirs, then all ranks together."""
    pair = dist.new_group([0, 1])
    found = []
    for group in (pair, None):
        if group is None or rank < 2:
            Detector.initialize(cuda_profiling="off", control=False, process_group=group)
            found.append(Detector.generate_report() is not None)
            Detector.shutdown()
    return found


def groups_of_one_name(rank):
    """Two pairs of ranks report at the same time, in groups that torch has named alike."""
    pairs = [dist.new_group(ranks, backend="cuda:gloo") for ranks in ([0, 1], [2, 3])]
    pair = pairs[rank // 2]
    pair._set_group_name("alike")
    Detector.initialize(cuda_profiling="off", control=False, process_group=pair)
    report = Detector.generate_report()
    Detector.shutdown()
    return report is not None


def group_on_gpus(rank):
    """Report in a group that, like one of NCCL, takes tensors on a GPU alone.

    Returns the scores, whether reports have a group of their own, what is said when rank 1 does
    not report, and what is said when it has other options.
    """
    log = _Log()
    group = dist.new_group([0, 1], backend="cuda:gloo")
    Detector.initialize(cuda_profiling="off", control=False, process_group=group)
    with Detector.detection_section("s"):
        pass
    samples = Detector.custom_sections["s"].cpu_elapsed_times
    samples.clear()
    samples.append(1.0 + rank)
    report = Detector.generate_report()
    scores = None if report is None else dict(report.section_relative_perf_scores["s"])
    has_own_group = Detector.reporter.group not in (None, group, dist.group.WORLD)
    Detector._session._worker._timeout_s = 2.0
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        Detector.generate_report()
        store.set("missed", "1")
    else:
        # Its connection must not end before rank 0 has looked for it.
        store.wait(["missed"])
    Detector.shutdown()
    reference = "median" if rank else "best"
    options = {"process_group": group, "reference": reference}
    Detector.initialize(cuda_profiling="off", control=False, **options)
    Detector.generate_report()
    Detector.shutdown()
    return scores, has_own_group, log.lines[0], log.lines[-1]


def steered_groups(rank, port, token_file):
    """Two pairs of ranks report by themselves; rank 0 sends a command to each and one to nobody.

    Returns the codes of the commands and the profiling interval that is in force afterwards.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(place, NVRX_STRAGGLER_TOKEN_FILE=token_file, TORCH_CPP_LOG_LEVEL="FATAL")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    Detector.initialize(cuda_profiling="off", process_group=pairs[rank // 2])
    Detector.generate_report()
    codes = []
    if rank == 0:
        command = ["set", "--store", f"127.0.0.1:{port}", "--profiling-interval"]
        for arguments in (["3"], ["5", "--first-rank", "2"], ["7", "--first-rank", "1"]):
            timeout = "1" if arguments[0] == "7" else str(DEADLINE_S)
            codes.append(main([*command, *arguments, "--timeout", timeout]))
    dist.barrier()
    Detector.generate_report()
    interval = Detector._session.settings.profiling_interval
    Detector.shutdown()
    return codes, interval


def descriptors_of_a_detector(rank):
    """Return how many descriptors a detector that was shut down has left open."""
    gc.disable()  # what has ended must not wait for the garbage collector
    dist.barrier()
    kept = []
    for _ in range(2):
        # The first one opens what stays open for good, such as the log of the machine's names.
        before = len(os.listdir("/proc/self/fd"))
        Detector.initialize(cuda_profiling="off", control=False)
        Detector.generate_report()
        Detector.generate_report()
        Detector.shutdown()
        kept.append(len(os.listdir("/proc/self/fd")) - before)
    dist.barrier()
    return kept


def long_name(rank):
    """Rank 1 has a kernel and a section whose names are too long to travel."""
    generator = ReportGenerator("all", node_name="n")
    name = "k" * (20_000 if rank else 10)
    kernels = {"shared": summary(1.0 + rank), name: summary(1.0)}
    sections = {"s": summary(1.0), f"{name}é": summary(1.0)}
    report = generator.generate_report(sections, kernels)
    generator.name_mapper.gather_and_assign_ids(["z" * (10 + 20_000 * rank)], [])
    scores = None if report is None else dict(report.gpu_relative_perf_scores)
    return scores, generator.name_mapper.kernel_counter, generator.name_mapper.digest


def subgroup_settings(rank):
    """Rank 1 of the job is rank 0 of the group that reports together, and changes its settings."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    Detector.initialize(
        scores_to_compute="individual_perf_scores",
        process_group=group,
        cuda_profiling="off",
        control=False,
    )
    try:
        Detector.request_settings(profiling_interval=4)
        outcome = "accepted"
    except RuntimeError as error:
        outcome = str(error)
    Detector.generate_report()
    found = outcome, Detector._session.settings.profiling_interval
    Detector.shutdown()
    return found


def changed_settings(rank, ranks):
    """Settings that rank 0 asks for are in force on all ranks after the same report."""
    Detector.initialize(cuda_profiling="off", control=False)
    seen = []
    for number in range(4):
        for _ in range(8):
            with Detector.detection_section("s"):
                pass
        if number == 1 and rank == 0:
            Detector.request_settings(profiling_interval=4, gpu_rel_threshold=0.5, ranks=ranks)
        Detector.generate_report()
        seen.append((Detector._session.settings.version, Detector._registry.interval))
    paused = Detector._registry.is_paused
    Detector.shutdown()
    return seen, paused


def restart_with_fewer_ranks(rank):
    """The detector is started again after the job went on with one rank less."""
    Detector.initialize(cuda_profiling="off", control=False, node_name=f"node{rank}")
    with Detector.detection_section("s"):
        pass
    Detector.generate_report()
    Detector.shutdown()
    survivors = dist.new_group([1, 2])
    if rank == 0:
        return None
    Detector.initialize(
        cuda_profiling="off", control=False, node_name=f"node{rank}", process_group=survivors
    )
    with Detector.detection_section("t"):
        pass
    report = Detector.generate_report()
    Detector.shutdown()
    return None if report is None else (
        dict(report.rank_to_node), sorted(report.section_relative_perf_scores)
    )  # fmt: skip
