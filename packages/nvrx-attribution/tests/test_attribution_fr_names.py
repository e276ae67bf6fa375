# SPDX-License-Identifier: Apache-2.0
"""The public names around the flight-recorder analysis, and the pipeline under them."""

import argparse
import asyncio
import contextlib
import logging
import sys
import threading

import attribution_traces as simulated
import pytest

from nvidia_resiliency_ext.attribution import base, utils
from nvidia_resiliency_ext.attribution._traces import table
from nvidia_resiliency_ext.attribution.trace_analyzer import capture, fr_attribution, fr_support

HEADER = "PGID | Process Group Desc | Op Type | Size | Dtype | Missing Ranks"


def folder_of(tmp_path, kind="host_stuck", seed=1):
    """Write generated dumps; return their folder and the guilty ranks."""
    job = simulated.make_job(kind, 16, seed)
    return str(simulated.write(job, tmp_path / kind)), job.guilty


def test_collective_analyzer(tmp_path):
    """The pipeline returns table and ranks; its parts are views of the same analysis."""
    folder, guilty = folder_of(tmp_path)
    with fr_attribution.CollectiveAnalyzer({"fr_path": folder, "pattern": "_dump_*"}) as analyzer:
        result, state = analyzer.run_sync({"fr_path": folder})
        assert state is base.AttributionState.CONTINUE
        assert result["hanging_ranks"] == f"hanging ranks: {guilty}"
        table = asyncio.run(analyzer.preprocess_FR_dumps())
        assert table.splitlines()[0] == HEADER
        assert all(
            row.rpartition("|")[2].strip() == str(guilty[0]) for row in table.splitlines()[1:]
        )
        completed, missing = analyzer.analyze_matches()
        assert missing
        assert all(row["ranks"] == guilty for row in missing.values())
        assert analyzer.group_pgs(missing) == {tuple(guilty): list(missing)}
        assert all(
            isinstance(op, fr_attribution.Collective) for ops in completed.values() for op in ops
        )
        copy = analyzer.init_config
        copy.clear()
        assert analyzer.init_config["fr_path"] == folder


def test_table_leaves_device_lag_to_the_ranks(tmp_path):
    """A rank whose device alone is late stands in the hanging ranks and not in the table."""
    folder, guilty = folder_of(tmp_path, "device_stuck", 3)
    with fr_attribution.CollectiveAnalyzer({"fr_path": folder}) as analyzer:
        table = asyncio.run(analyzer.preprocess_FR_dumps())
        assert table == HEADER
        assert str(guilty) in analyzer.run_sync({})[0]["hanging_ranks"]
    with fr_attribution.CollectiveAnalyzer(
        {"fr_path": folder, "include_device_lag": 1}
    ) as analyzer:
        assert asyncio.run(analyzer.preprocess_FR_dumps()).count("\n") >= 1


def test_one_file_at_a_time(tmp_path):
    """Dumps can be added singly; state does not stay from run to run; no dumps is an error."""
    folder, _ = folder_of(tmp_path)
    analyzer = fr_attribution.CollectiveAnalyzer({"fr_path": folder})
    with analyzer:
        assert all(analyzer.process_file(f"{folder}/_dump_{rank}") for rank in range(16))
        assert not analyzer.process_file(f"{folder}/none")
        assert analyzer.analyze_matches()[1]
        other, other_guilty = folder_of(tmp_path, "p2p_host", 2)
        assert str(other_guilty) in analyzer.run_sync({"fr_path": other})[0]["hanging_ranks"]
        with pytest.raises(ValueError, match="no dump"):
            analyzer.run_sync({"fr_path": str(tmp_path)})


def test_program_of_old(tmp_path, capsys):
    """The program with the known flags prints the table on stdout when it is asked to."""
    folder, guilty = folder_of(tmp_path)
    assert fr_attribution.main(["--fr-path", folder, "-v", "-c", "--emit-stdout"]) == 0
    assert HEADER in (out := capsys.readouterr().out)
    assert f"hanging ranks: {guilty}" in out
    assert fr_attribution.main(["--fr-path", str(tmp_path / "no")]) == 3


def test_dump_path_of_a_log(tmp_path):
    """The dumps of a log are found by what it printed and by where it lies, below the root only."""
    run = tmp_path / "run"
    (run / "logs" / "x").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    log = run / "logs" / "x" / "job.log"
    log.write_text("hello\n")
    assert fr_support.extract_fr_dump_path(str(log)) is None
    (run / "checkpoints" / "_dump_0").write_text("")
    assert fr_support.extract_fr_dump_path(str(log)) == str(run / "checkpoints")
    (tmp_path / "fr_1").write_text("")
    log.write_text(f"TORCH_FR_DUMP_TEMP_FILE={tmp_path}/fr_\n")
    assert fr_support.extract_fr_dump_path(str(log)) == f"{tmp_path}/fr_"
    assert fr_support.extract_fr_dump_path(str(log), str(run)) == str(run / "checkpoints")
    log.write_text(f"TORCH_FR_DUMP_TEMP_FILE={tmp_path}\n")
    (run / "checkpoints" / "_dump_0").unlink()
    assert fr_support.extract_fr_dump_path(str(log)) is None
    assert fr_support.fr_path_resolvable_for_collective_analyzer(f"{tmp_path}/fr_")
    assert not fr_support.fr_path_resolvable_for_collective_analyzer(f"{tmp_path}/none")


def test_result_and_its_forms(tmp_path):
    """The result has text, ranks and report; without a rank nothing is appended to a message."""
    folder, guilty = folder_of(tmp_path)
    analyzer = fr_support.TraceAnalyzer(str(tmp_path))
    result = asyncio.run(analyzer.analyze_fr_dump(folder))
    assert result.report["guilty_ranks"] == guilty
    assert HEADER in result.analysis_text
    fields = fr_support.fr_fields_for_dataflow_record(folder, result)
    assert fields["l_hanging_ranks"] == guilty
    assert fields["s_fr_dump_path"] == folder
    assert str(guilty) in fr_support.fr_markdown_appendix_from_result(folder, result)
    empty = fr_support.FRAnalysisResult("x", "hanging ranks: []")
    assert fr_support.fr_markdown_appendix_from_result(folder, empty) == ""
    assert asyncio.run(analyzer.analyze_fr_dump(str(tmp_path / "none"))) is None
    assert asyncio.run(analyzer.analyze_fr_dump("/etc")) is None
    reply = {"result": {"analysis_text": "a", "hanging_ranks": "hanging ranks: [1]"}}
    assert fr_support.fr_result_from_mcp_module_response(reply).hanging_ranks.endswith("[1]")
    assert fr_support.fr_result_from_mcp_module_response({"error": "x"}) is None


def test_dumps_whose_text_cannot_be_made(tmp_path, monkeypatch):
    """A fault while the text is made is one of the analysis: no result, and nothing is raised."""

    def fail(*_, **__):
        raise KeyError("inside")

    monkeypatch.setattr(table, "format_summary", fail)
    folder, _ = folder_of(tmp_path)
    assert asyncio.run(fr_support.analyze_fr_dump(folder)) is None


def test_exported_text_about_dumps_is_bounded():
    """Names in dumps are foreign text: without secrets, and of limited length, in a record."""
    key = "sk-" + "a" * 24
    long = fr_support.FRAnalysisResult(f"group {key}\n" + "x" * 100_000, "hanging ranks: [1]")
    text = fr_support.fr_fields_for_dataflow_record("/d", long)["s_fr_analysis"]
    assert text.startswith("group [redacted]\nx")
    assert len(text) <= 1 << 14


class WithAttributes:
    """Anything with attributes."""

    def __init__(self):
        self.a = 1


def test_run_arguments():
    """Arguments come from a namespace, a mapping, two results or any object, as a copy."""
    for given in (argparse.Namespace(a=1), {"a": 1}, WithAttributes()):
        assert base.normalize_attribution_args(given) == {"a": 1}
    assert base.normalize_attribution_args((1, 2)) == {"input_data": [1, 2]}
    for bad in ((1,), 3, None):
        with pytest.raises(TypeError):
            base.normalize_attribution_args(bad)


def test_pipeline():
    """Each run sees its own arguments, in threads too; wrong pipelines are refused."""

    def read(args):
        assert base.peek_attribution_run_args() is args
        return args["n"]

    async def work(n: int) -> int:
        await asyncio.sleep(0)
        return n * base.current_attribution_run_args()["factor"]

    def finish(n: int) -> tuple:
        return n, base.AttributionState.STOP

    async def both(pipeline):
        runs = [pipeline.run({"n": n, "factor": n}) for n in range(20)]
        return [result for result, _ in await asyncio.gather(*runs)]

    async def inside(pipeline):
        with pytest.raises(RuntimeError, match="await run"):
            pipeline.run_sync({})

    with base.NVRxAttribution(read, work, finish) as pipeline:
        assert asyncio.run(both(pipeline)) == [n * n for n in range(20)]
        assert pipeline.run_sync({"n": 2, "factor": 4}) == (8, base.AttributionState.STOP)
        asyncio.run(inside(pipeline))
        assert base.merged_attribution_config({"a": 1}) == {"a": 1}
        assert base.effective_run_or_init_config({"a": 1}) == {"a": 1}
    with pytest.raises(RuntimeError, match="no attribution run"):
        base.current_attribution_run_args()
    with pytest.raises(TypeError):
        base.NVRxAttribution(lambda a, b: (a, b), work, finish)

    def returns_text(args) -> str:
        return ""

    with pytest.raises(ValueError, match="preprocess_input returns"):
        base.NVRxAttribution(returns_text, work, finish)
    base.NVRxAttribution.reset_thread_event_loop()


def test_captures(capsys):
    """Only this thread's logs and prints are captured; all is put back after an error."""
    assert utils.capture_logs is capture.capture_logs
    log = logging.getLogger("captured")
    handlers = list(log.handlers)
    with contextlib.suppress(ZeroDivisionError), utils.capture_logs("captured") as text:
        log.warning("mine")
        other = threading.Thread(target=log.warning, args=("theirs",))
        other.start()
        other.join()
        with utils.capture_logs("captured") as inner:
            log.warning("inner")
        raise ZeroDivisionError
    assert (text.getvalue(), inner.getvalue()) == ("mine\n", "inner\n")
    assert log.handlers == handlers
    with utils.capture_stdout() as printed:
        sys.stdout.write("mine\n")
        other = threading.Thread(target=print, args=("theirs",))
        other.start()
        other.join()
    assert printed.getvalue() == "mine\n"
    assert capsys.readouterr().out == "theirs\n"


def test_captures_of_threads_overlap(capsys):
    """A capture that begins in another one and ends after it loses nothing and leaves nothing."""
    before = sys.stdout
    inside, go_on = threading.Event(), threading.Event()
    found = []

    def other():
        with utils.capture_stdout() as text:
            inside.set()
            go_on.wait(60)
            sys.stdout.write("theirs\n")
        found.append(text.getvalue())

    thread = threading.Thread(target=other)
    with utils.capture_stdout() as mine:
        thread.start()
        inside.wait(60)
        sys.stdout.write("mine\n")
    go_on.set()
    thread.join()
    assert (mine.getvalue(), found) == ("mine\n", ["theirs\n"])
    assert sys.stdout is before


def test_annotations_as_text():
    """Steps of a module that postpones annotations fit those of one that does not."""

    def count(text: "str") -> "int":
        return len(text)

    def show(number: int) -> tuple:
        return number, base.AttributionState.CONTINUE

    def wrong(text: str) -> tuple:
        return text, base.AttributionState.CONTINUE

    with base.NVRxAttribution(lambda args: args["text"], count, show) as pipeline:
        assert pipeline.run_sync({"text": "abc"})[0] == 3
    with pytest.raises(ValueError, match="attribution returns"):
        base.NVRxAttribution(lambda args: args["text"], count, wrong)
