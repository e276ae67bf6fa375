# SPDX-License-Identifier: Apache-2.0
"""Flight-recorder dumps: what is read of them, and who is accused."""

import contextlib
import gc
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import attribution_traces as simulated
import pytest

from nvidia_resiliency_ext.attribution import cli
from nvidia_resiliency_ext.attribution._core.errors import NoTraceError
from nvidia_resiliency_ext.attribution._traces import dumps, loading, reading
from nvidia_resiliency_ext.attribution._traces.analysis import analyze_dumps, analyze_traces
from nvidia_resiliency_ext.attribution._traces.dumps import decode_dump
from nvidia_resiliency_ext.attribution._traces.loading import LoadedTraces, load_traces
from nvidia_resiliency_ext.attribution._traces.pickles import UnsafePickleError, load_plain
from nvidia_resiliency_ext.shared_utils.clock import Deadline

RECORDED = Path(__file__).with_name("recorded_traces")


def analyzed(job):
    """Analyse generated dumps without files."""
    dumps = {rank: decode_dump(dump, rank, str(rank)) for rank, dump in job.dumps.items()}
    return analyze_dumps(LoadedTraces(dumps))


@pytest.mark.parametrize("kind", [*simulated.KINDS, "healthy"])
@pytest.mark.parametrize("size", [16, 64])
def test_generated_faults_are_found(kind, size):
    """The guilty ranks and the kind of nearly every simulated fault are exact; health is none."""
    seeds = range(6 if size == 16 else 3)
    found = [(job := simulated.make_job(kind, size, seed), analyzed(job)) for seed in seeds]
    right = [
        analysis.guilty_ranks == job.guilty and analysis.kind == simulated.EXPECTED_KIND[kind]
        for job, analysis in found
    ]
    assert sum(right) >= (len(right) if kind == "healthy" else 0.8 * len(right))


@pytest.mark.parametrize("folder", sorted(RECORDED.iterdir()), ids=lambda folder: folder.name)
def test_recorded_jobs(folder):
    """All guilty ranks of dumps that real 16-rank jobs left are named, and nobody else."""
    label = json.loads((folder / "label.json").read_text())
    analysis = analyze_traces(str(folder))
    assert (analysis.guilty_ranks, analysis.kind) == (label["guilty"], label["kind"])


def test_order_of_two_groups():
    """Ranks that wait for each other because one calls two groups in the other order are named."""
    groups = {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}

    def dump(order):
        entries = [
            {
                "record_id": position,
                "pg_id": int(name),
                "process_group": (name, f"GROUP{name}"),
                "collective_seq_id": 1,
                "profiling_name": "nccl:all_reduce",
                "input_sizes": [[8]],
                "input_dtypes": ["Float"],
                "state": "scheduled",
            }
            for position, name in enumerate(order)
        ]
        config = {n: {"name": n, "desc": f"GROUP{n}", "ranks": str(m)} for n, m in groups.items()}
        return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}

    orders = {0: "01", 1: "01", 2: "10", 3: "01"}
    dumps = {rank: decode_dump(dump(order), rank, "x") for rank, order in orders.items()}
    analysis = analyze_dumps(LoadedTraces(dumps))
    assert (analysis.kind, analysis.guilty_ranks) == ("deadlock", [2])
    assert any(finding.kind == "cycle" for finding in analysis.findings)


class Evil:
    """A value whose pickle runs a command when it is read carelessly."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_hostile_pickle_runs_nothing(tmp_path):
    """A dump that would run a command becomes a finding; the other ranks are analysed."""
    job = simulated.make_job("host_stuck", 16, 1)
    folder = simulated.write(job, tmp_path / "dumps")
    victim = next(rank for rank in range(16) if rank not in job.guilty)
    mark = tmp_path / "mark"
    (folder / f"_dump_{victim}").write_bytes(pickle.dumps({"entries": [Evil(mark)]}))
    analysis = analyze_traces(str(folder))
    assert not mark.exists()
    assert [f.kind for f in analysis.findings] == ["unsafe_pickle"]
    assert analysis.guilty_ranks == job.guilty


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02}r\xff\xff\xff\x7f.",  # an index that would take 16 GiB
        b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"\x80\x02" + b"(" * 100_000,
        b"\x80\x02}q\x00U\x07entriesh\x00s.",
        b"{" * 100_000,
        b"[1, 2]",
        b"\xff\xfe\x00",
    ],
)
def test_bad_files_are_refused(data, tmp_path):
    """No bytes of a dump file make reading do more than refuse them."""
    (tmp_path / "_dump_0").write_bytes(data)
    with pytest.raises(NoTraceError):
        load_traces(str(tmp_path))


def test_dumps_that_hold_too_much_together_are_refused(tmp_path):
    """Files that are small enough each cost bounded memory together: an error says what to do."""
    job = simulated.make_job("host_stuck", 16, 1)
    folder = str(simulated.write(job, tmp_path))
    assert len(load_traces(folder, total_limit_bytes=1 << 20).dumps) == 16
    with pytest.raises(NoTraceError, match=r"more than 2000 bytes of entries .* choose some"):
        load_traces(folder, total_limit_bytes=2_000)


def test_answers_that_wait_to_be_read_count(tmp_path, monkeypatch):
    """What a reader has written counts while the answers of another one are read."""
    monkeypatch.setattr(loading, "_WORKER", "print('{}' + ' ' * 3000)")
    orders = {"limit_bytes": 1, "allowed_root": None, "cpu_s": 60}
    budget = loading._MemoryBudget("dumps", 4_000)
    deadline = Deadline.after(60)
    with contextlib.ExitStack() as stack:
        start = [stack.enter_context(loading._Worker([("a", 0)], orders, budget)) for _ in range(2)]
        assert all(worker._child.wait(60) for worker in start)
        with pytest.raises(NoTraceError, match="more than 4000 bytes"):
            list(start[0].answers(0.01, deadline))


def test_functions_are_refused():
    """A pickle may name plain containers and nothing else."""
    assert load_plain(pickle.dumps({"a": [1, (2, {3})]}, protocol=2)) == {"a": [1, (2, {3})]}
    with pytest.raises(UnsafePickleError, match="getattr"):
        load_plain(pickle.dumps(getattr))


def test_workers_read_the_same(tmp_path):
    """Dumps that worker processes read are the same as those read here; a hostile one is found."""
    job = simulated.make_job("device_stuck", 64, 2, steps=30)
    simulated.write(job, tmp_path)
    mark = tmp_path / "mark"
    (tmp_path / "_dump_64").write_bytes(pickle.dumps({"entries": [Evil(mark)]}))
    loaded = load_traces(str(tmp_path))
    assert not mark.exists()
    assert [finding.kind for finding in loaded.findings] == ["unsafe_pickle"]
    expected = {rank: decode_dump(d, rank, f"_dump_{rank}") for rank, d in job.dumps.items()}
    assert loaded.dumps == expected


def test_row_that_is_never_sent_leaves_no_numbers(monkeypatch):
    """Where memory ends while a row is made, the next one is whole: its reader knows no number."""
    data, other, *_ = simulated.make_job("device_stuck", 8, 2).dumps.values()
    expected = decode_dump(data, 0, "_dump_0")
    broken = decode_dump(data, 0, "_dump_0")
    earlier = decode_dump(other, 1, "_dump_1")
    tries = iter([earlier, broken, expected])

    def read(*_):
        dump = next(tries)
        monkeypatch.setattr(reading, "_newest", exhausted if dump is broken else newest)
        return dump

    def exhausted(table, count):
        raise MemoryError

    newest = reading._newest  # is called when the tables are filled
    monkeypatch.setattr(reading, "read_dump", read)
    orders = {"limit_bytes": 1, "allowed_root": None}
    writer, reader = reading.DumpWriter(), reading.DumpReader()
    for wanted in (earlier, expected):
        row = json.loads(json.dumps(reading._answer("file", 0, orders, writer)))
        assert reader.dump(row) == wanted


def test_texts_of_groups_are_not_kept_without_end(monkeypatch):
    """Long lists of members are forgotten before they fill a worker, or cut where none counts."""
    monkeypatch.setattr(reading, "_TABLE_CHARS", 20)
    monkeypatch.setattr(dumps, "_MEMBERS_CHARS", 30)
    writer, reader = reading.DumpWriter(), reading.DumpReader()
    fresh = []
    for text in ("[0, 1]", "[0, 1, 2, 3, 4, 5, 6]", "[0, 1]", "[0]" + 90 * " "):
        dump = decode_dump({"pg_config": {"0": {"ranks": text}}, "entries": []}, 0, "_dump_0")
        row = writer.row(dump)
        fresh.append(row["fresh"])
        assert reader.dump(row) == dump
        assert dump.groups[0].members_text == text[:31]
    assert fresh == [True, False, True, False]
    assert dumps.parse_members(dump.groups[0].members_text) == ()


def test_pauses_of_the_collector_may_overlap():
    """The collector is off until the last pause has ended, and then as before."""
    assert gc.isenabled()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(loading.collector_paused())
        second.enter_context(loading.collector_paused())
        first.close()
        assert not gc.isenabled()
        second.close()
        assert gc.isenabled()


def test_lines_of_any_length_are_read_whole(monkeypatch):
    """Lines that are far longer or shorter than what is read at once stay what they are."""
    monkeypatch.setattr(loading, "_READ_BYTES", 4)
    lines = [b"", b"a", b"abcdefghij", b"abc", b"abcd", b"x" * 100, b""]
    worker = object.__new__(loading._Worker)
    worker._offset, worker._rest = 0, []
    worker._budget = loading._MemoryBudget("", 1000)
    worker._answers = os.memfd_create("lines")
    try:
        found = []
        for line in lines:
            os.write(worker._answers, line[:5])
            found += worker._new_lines()
            os.write(worker._answers, line[5:] + b"\n")
            found += worker._new_lines()
    finally:
        os.close(worker._answers)
    assert found == lines


def test_nested_pickle_costs_one_rank(tmp_path, monkeypatch):
    """A pickle that takes for ever to read is ended and reported; the other ranks are analysed."""
    monkeypatch.setattr(loading, "_CPU_S_PER_FILE", 1)
    job = simulated.make_job("host_stuck", 16, 1)
    folder = simulated.write(job, tmp_path / "dumps")
    victim = next(rank for rank in range(16) if rank not in job.guilty)
    # A tuple of twice the same tuple, sixty times over, as a key: its hash takes 2**60 steps.
    nested = b"\x80\x02}" + b")" + b"2\x86" * 60 + b"K\x01s."
    (folder / f"_dump_{victim}").write_bytes(nested)
    analysis = analyze_traces(str(folder))
    assert [f.kind for f in analysis.findings] == ["unreadable"]
    assert "CPU" in analysis.findings[0].text
    assert analysis.guilty_ranks == job.guilty


def test_cycles_in_a_dump_cost_no_other(tmp_path, monkeypatch):
    """Dumps full of lists that hold themselves do not take the memory for the others."""
    monkeypatch.setattr(loading, "_MOST_WORKERS", 1)
    job = simulated.make_job("host_stuck", 16, 1)
    folder = simulated.write(job, tmp_path / "dumps")
    # A list that holds itself and a text of 0.4 GiB, which counting never frees: four bytes a
    # character for the sake of the first one. The others are NUL, a hole in the file.
    first, characters = "\U0001f600".encode(), 100 << 20
    size = (len(first) + characters).to_bytes(4, "little")
    key = b"\x80\x02}(X\x07\x00\x00\x00entries]X\x07\x00\x00\x00version]X\x01\x00\x00\x00z"
    for rank in range(16, 22):
        with (folder / f"_dump_{rank}").open("wb") as file:
            file.write(key + b"]q\x01(X" + size + first)
            file.seek(characters, os.SEEK_CUR)
            file.write(b"h\x01eu.")
    loaded = load_traces(str(folder))
    assert loaded.findings == []
    assert len(loaded.dumps) == 22


def test_links_out_of_the_root_are_not_read(tmp_path):
    """With a root, a dump that is a link to a file outside of it is a finding."""
    job = simulated.make_job("host_stuck", 16, 1)
    folder = simulated.write(job, tmp_path / "root" / "dumps")
    victim = next(rank for rank in range(16) if rank not in job.guilty)
    (folder / f"_dump_{victim}").rename(tmp_path / "elsewhere")
    (folder / f"_dump_{victim}").symlink_to(tmp_path / "elsewhere")
    found = analyze_traces(str(folder), allowed_root=str(tmp_path / "root"))
    assert [(f.kind, f.file) for f in found.findings] == [("outside_root", f"_dump_{victim}")]
    assert not analyze_traces(str(folder)).findings
    with pytest.raises(NoTraceError, match="outside"):
        analyze_traces(str(folder), allowed_root=str(tmp_path / "other"))


def test_reader_that_cannot_start_leaves_nothing(tmp_path, monkeypatch):
    """Without an interpreter for the readers there is an error, and no open descriptor."""
    folder = simulated.write(simulated.make_job("host_stuck", 16, 1), tmp_path / "dumps")
    for interpreter, text in (("/does/not/exist", "start"), ("/bin/false", "exit code 1")):
        gc.collect()  # what earlier tests left is closed now, and not meanwhile
        before = os.listdir("/proc/self/fd")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", interpreter)
            with pytest.raises(NoTraceError, match=text):
                load_traces(str(folder))
        assert os.listdir("/proc/self/fd") == before


def test_readers_import_as_the_caller_does(tmp_path):
    """A program that put the package on its path by itself can read dumps, too."""
    folder = simulated.write(simulated.make_job("host_stuck", 16, 1), tmp_path / "dumps")
    paths = [path for path in sys.path if path]
    import nvidia_resiliency_ext

    paths += [os.path.dirname(path) for path in nvidia_resiliency_ext.__path__]
    code = (
        f"import sys; sys.path[:] = {paths!r}\n"
        "from nvidia_resiliency_ext.attribution._traces.loading import load_traces\n"
        f"assert len(load_traces({str(folder)!r}).dumps) == 16"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=120)


def test_json_and_pickle_agree(tmp_path):
    """The report is the same whether dumps are JSON or pickles, mixed or not."""
    job = simulated.make_job("p2p_host", 16, 5)
    as_json = analyze_traces(str(simulated.write(job, tmp_path / "json", as_json=True))).to_dict()
    folder = simulated.write(job, tmp_path / "mixed")
    (folder / "_dump_3").unlink()
    (folder / "_dump_3.json").write_text(json.dumps(job.dumps[3]))
    mixed = analyze_traces(str(folder)).to_dict()
    assert {**as_json, "elapsed_s": 0} == {**mixed, "elapsed_s": 0}


def test_names_with_hosts(tmp_path):
    """Ranks are found in other names of files, also with an expression of the user's."""
    job = simulated.make_job("host_stuck", 16, 4)
    for rank, dump in job.dumps.items():
        (tmp_path / f"nccl_trace_rank_node7_{rank}").write_bytes(pickle.dumps(dump))
    assert analyze_traces(str(tmp_path)).guilty_ranks == job.guilty
    assert analyze_traces(str(tmp_path / "nccl_trace_rank_")).guilty_ranks == job.guilty
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / f"r{path.name.rpartition('_')[2]}.node7")
    found = analyze_traces(str(tmp_path), "r*", rank_regex=r"^r(\d+)\.")
    assert found.guilty_ranks == job.guilty


def test_some_dumps_are_missing(tmp_path):
    """Ranks without a dump are not accused when one with a dump holds the same operation up."""
    job = simulated.make_job("host_stuck", 64, 7)
    others = [rank for rank in job.dumps if rank not in job.guilty]
    for rank in others[::5]:
        del job.dumps[rank]
    analysis = analyzed(job)
    assert set(job.guilty) <= set(analysis.guilty_ranks)
    assert analysis.to_dict()["ranks_missing"]


@pytest.mark.slow
def test_time_is_linear(tmp_path):
    """Four times as many ranks take about four times as long, not nine."""
    seconds = {}
    for size in (256, 1024):
        job = simulated.make_job("host_stuck", size, 1)
        dumps = {rank: decode_dump(dump, rank, "x") for rank, dump in job.dumps.items()}
        times = []
        for _ in range(3):
            started = time.process_time()
            analyze_dumps(LoadedTraces(dumps))
            times.append(time.process_time() - started)
        seconds[size] = min(times)
    assert seconds[1024] < 9 * seconds[256]


def test_program(tmp_path, capsys):
    """The program prints a report as text or JSON, and one line for a directory without dumps."""
    job = simulated.make_job("wrong_size", 16, 3)
    folder = str(simulated.write(job, tmp_path / "dumps"))
    assert cli.main(["fr", folder]) == 0
    assert f"guilty ranks: {job.guilty[0]}" in capsys.readouterr().out
    assert cli.main(["fr", folder, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["guilty_ranks"]) == ("nvrx_fr_report.v1", job.guilty)
    assert report["suspects"][0]["note"]
    assert cli.main(["fr", str(tmp_path)]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_import_is_light():
    """Neither the package nor the program's parser imports torch or a library of an extra."""
    code = (
        "import sys, nvidia_resiliency_ext.attribution.cli as c, nvidia_resiliency_ext.attribution"
        ".trace_analyzer, nvidia_resiliency_ext.attribution.engine; c.build_parser()\n"
        "bad = {'torch', 'numpy', 'openai', 'mcp', 'fastapi', 'httpx',"
        " 'pydantic', 'asyncio'} & set(sys.modules); sys.exit(bad and str(bad) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
