# SPDX-License-Identifier: Apache-2.0
"""The log engine and the fusion behind the names that older programs use."""

import json
import tracemalloc

import attribution_traces as simulated
import pytest
from attribution_model_server import completion, serving

import nvidia_resiliency_ext.attribution as package
from nvidia_resiliency_ext.attribution import cli, engine
from nvidia_resiliency_ext.attribution._core.verdict import RawAnalysisResultItem
from nvidia_resiliency_ext.attribution.base import AttributionState
from nvidia_resiliency_ext.attribution.combined_log_fr import combined_log_fr
from nvidia_resiliency_ext.attribution.log_analyzer import nvrx_logsage

OOM = "torch.OutOfMemoryError: CUDA out of memory.\n"
STEP = "iteration 7/ 500 | consumed samples: 64 | lm loss: 2.1E+00 |\n"
CYCLE = "INFO profiling.py:80   - Cycle: {} Event: worker_start_started Node: n Rank: None\n"


def test_log_of_one_cycle(tmp_path):
    """A fault that a restart meets again gives STOP, with five lines of text."""
    log = tmp_path / "job_cycle3.log"
    log.write_text(OOM)
    with nvrx_logsage.NVRxLogAnalyzer({"log_path": str(log), "is_per_cycle": True}) as analyzer:
        results, state = analyzer.run_sync({"cycle_counter": 3})
    assert state is AttributionState.STOP
    assert results[0][0].splitlines()[0] == "STOP - DONT RESTART IMMEDIATE"
    assert results[0][0].count("\n") == 4
    assert [path.name for path in tmp_path.iterdir()] == [log.name]


def test_log_of_several_cycles(tmp_path, capsys):
    """Each cycle of a log has a result; what stands before a cycle's start is left out."""
    log = tmp_path / "job.log"
    text = CYCLE.format(0) + OOM + "FT: initialized\n" + STEP + CYCLE.format(1) + OOM
    log.write_text(text)
    lines = text.splitlines()
    assert nvrx_logsage.chunk_logs_strict(lines) == {0: [STEP.strip()], 1: [OOM.strip()]}
    assert nvrx_logsage.chunk_logs_strict(["a"]) == {0: ["a"]}
    assert nvrx_logsage.lines_after(["a", "xbx", "c"], "b") == ["c"]
    with nvrx_logsage.NVRxLogAnalyzer({"log_path": str(log)}) as analyzer:
        results, _ = analyzer.run_sync({})
    assert [state.name for _, state in results] == ["CONTINUE", "STOP"]
    assert nvrx_logsage.main(["--log-path", str(log), "--emit-stdout", "--exclude_nvrx_logs"]) == 0
    assert "gpu.oom" in capsys.readouterr().out
    assert nvrx_logsage.main(["--log-path", str(tmp_path / "none")]) == 3
    with pytest.raises(ValueError, match="log_path"), nvrx_logsage.NVRxLogAnalyzer({}) as analyzer:
        analyzer.run_sync({})


def test_results_together(tmp_path, capsys):
    """More ranks than the threshold give STOP, from results and from files."""
    results = [
        ("RESTART IMMEDIATE", 1),
        {"analysis_text": "t", "hanging_ranks": "hanging ranks: [1, 2]"},
    ]
    with combined_log_fr.CombinedLogFR({"input_data": results, "threshold": 1}) as combined:
        text, state = combined.run_sync(results)
        assert (state, "[1, 2]" in text) == (AttributionState.STOP, True)
        state = combined.run_sync({"input_data": results, "threshold": 2})[1]
        assert state is AttributionState.CONTINUE
    job = simulated.make_job("host_stuck", 16, 1)
    folder = str(simulated.write(job, tmp_path / "fr"))
    log = tmp_path / "job.log"
    log.write_text(
        "[rank1]: Watchdog caught collective operation timeout: ran for 6 milliseconds\n"
    )
    assert combined_log_fr.main(["--log-path", str(log), "--fr-path", folder]) == 0
    assert f"ranks to exclude: {job.guilty}" in capsys.readouterr().out
    assert combined_log_fr.main(["--log-path", str(tmp_path / "no"), "--fr-path", folder]) == 3
    with (
        pytest.raises(ValueError, match="input_data"),
        combined_log_fr.CombinedLogFR({}) as combined,
    ):
        combined.run_sync({})


def test_program_for_both(tmp_path, capsys, monkeypatch):
    """Dumps of several directories count together, by pattern; a summary needs an address."""
    monkeypatch.delenv("NVRX_LLM_BASE_URL", raising=False)
    job = simulated.make_job("host_stuck", 16, 1)
    folder = simulated.write(job, tmp_path / "a")
    (tmp_path / "b").mkdir()
    for rank in range(8):
        (folder / f"_dump_{rank}").rename(tmp_path / "b" / f"_dump_{rank}")
    log = tmp_path / "job.log"
    log.write_text(
        "[NestedRestarter] RuntimeError: CUDA error: uncorrectable ECC error\n"
        "[rank1]: Watchdog caught collective operation timeout: ran for 6 milliseconds\n"
    )
    base = ["--log-path", str(log), "--exclude_nvrx_logs", "--fr-path"]
    folders = [str(folder), str(tmp_path / "b")]
    assert combined_log_fr.main([*base, *folders, "-v", "-c"]) == 0
    printed = capsys.readouterr()
    assert f"ranks to exclude: {job.guilty}" in printed.out
    assert "ECC" not in printed.out
    assert "GROUP" in printed.err or "|" in printed.err
    assert combined_log_fr.main([*base, *folders, "--pattern", "other_*"]) == 0
    assert combined_log_fr.main([*base, *folders, "-l"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    pytest.importorskip("httpx")
    with serving(completion("Rank 3 hung.")) as (url, _):
        assert combined_log_fr.main([*base, *folders, "-l", "-m", "m", "-b", url]) == 0
    assert "Rank 3 hung." in capsys.readouterr().out


def test_files_are_not_held_whole(tmp_path, capsys):
    """A line of 64 MiB costs no program that reads logs as much memory; the next line is read."""
    log = tmp_path / "job.log"
    with log.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(64 << 20)
        file.write(b"\nnvrx: hello\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    given = {"log_path": str(log)}
    verdicts = []
    tracemalloc.start()
    try:
        assert cli.main(["explain", f"{log}:3"]) == cli.main(["registry", "test", str(log)]) == 0
        for config in (given, {**given, "exclude_nvrx_logs": True}):
            for kind in (combined_log_fr.CombinedLogFR, nvrx_logsage.NVRxLogAnalyzer):
                with kind(config) as analyzer:
                    analyzer.run_sync(config)
                    verdicts.append(analyzer.verdict)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert {verdict.reason_code for verdict in verdicts} == {"gpu.oom"}
    assert [verdict.coverage["lines"] for verdict in verdicts] == [3, 3, 2, 2]
    assert "3: gpu.oom" in capsys.readouterr().out


def test_result_item(tmp_path):
    """The item of older callers survives JSON, and needs all of its keys."""
    log = tmp_path / "x.log"
    log.write_text(OOM)
    item = engine.analyze(log).to_item()
    assert package.RawAnalysisResultItem is RawAnalysisResultItem
    assert RawAnalysisResultItem.from_payload(json.loads(json.dumps(item.to_payload()))) == item
    with pytest.raises(TypeError, match="raw_text"):
        RawAnalysisResultItem.from_payload({"action": "STOP"})
    assert package.TraceAnalyzer.__name__ == "TraceAnalyzer"
