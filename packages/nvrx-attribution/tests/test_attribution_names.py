# SPDX-License-Identifier: Apache-2.0
"""Public names that no other test calls, and the table that names a test for each public name."""

import ast
import asyncio
import dataclasses
import functools
import importlib
import inspect
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attribution_traces as simulated
import pytest

import nvidia_resiliency_ext.attribution as package
from nvidia_resiliency_ext.attribution import _api, analyzer, api_keys, base, engine
from nvidia_resiliency_ext.attribution._live.sessions import SessionTimes
from nvidia_resiliency_ext.attribution.analyzer import Analyzer
from nvidia_resiliency_ext.attribution.coalescing import types as coalescing_types
from nvidia_resiliency_ext.attribution.coalescing.coalescer import RequestCoalescer
from nvidia_resiliency_ext.attribution.combined_log_fr import llm_merge
from nvidia_resiliency_ext.attribution.log_analyzer import nvrx_logsage
from nvidia_resiliency_ext.attribution.mcp_integration import mcp_client, registry, server_launcher
from nvidia_resiliency_ext.attribution.orchestration import (
    analysis_pipeline,
    client_response,
    config,
    http_api,
    job,
    llm_output,
    log_path_metadata,
    progressive,
    types,
    utils,
)
from nvidia_resiliency_ext.attribution.postprocessing import pipeline, post_backend
from nvidia_resiliency_ext.attribution.trace_analyzer import (
    fr_attribution,
    fr_support,
    trace_collector,
)
from nvidia_resiliency_ext.services import smonsvc
from nvidia_resiliency_ext.services.smonsvc import job_handlers, models, slurm, status_server
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

HERE = Path(__file__).parent
TABLE = HERE / "attribution_names.json"
OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory.\n"
FAST = SessionTimes(quiet_s=0.2, poll_s=0.02, growing_poll_s=0.02)


def table():
    """Return (module, name, test) of each row."""
    rows = json.loads(TABLE.read_text())
    return [(module, name, test) for module, names in rows.items() for name, test in names.items()]


source_of = functools.cache(inspect.getsource)  # it parses the whole file each time


def resolve(module, name):
    """Return what a name of a module stands for; `Class.member` is allowed."""
    found = importlib.import_module(f"nvidia_resiliency_ext.{module}")
    for part in name.split("."):
        if dataclasses.is_dataclass(found) and part in found.__dataclass_fields__:
            return found.__dataclass_fields__[part]
        if isinstance(found, type) and f"self.{part} = " in source_of(found):
            return part
        found = getattr(found, part)
    return found


@functools.cache
def sources(file):
    """Return the source of each test of a file, with its decorators."""
    text = (HERE / file).read_text()
    return {
        node.name: "\n".join(
            text.splitlines()[
                min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno
            ]
        )
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


def test_each_public_name_has_a_test():
    """Every name of the table exists, its test exists and calls it; the package's are all there."""
    for module, name, test in table():
        assert resolve(module, name) is not None
        file, _, function = test.partition("::")
        assert name.rpartition(".")[2] in sources(file)[function], f"{test} does not name {name}"
    listed = {name.partition(".")[0] for _, name, _ in table()}
    assert set(_api.__all__) <= listed


def test_names_of_the_package_have_their_values():
    """Constants, codes and types under the names of the package are those of their modules."""
    texts = {
        name: getattr(package, name)
        for name in (
            *("RESP_ERROR", "RESP_FILES_ANALYZED", "RESP_LOGS_DIR", "RESP_LOG_FILE", "RESP_MODE"),
            *("RESP_MODULE", "RESP_RESULT", "RESP_RESULT_ID", "RESP_SCHED_RESTARTS", "RESP_STATE"),
            *("RESP_STATUS", "RESP_WL_RESTART", "RESP_WL_RESTART_COUNT"),
        )
    }
    assert {f"RESP_{text.upper()}" for text in texts.values()} == set(texts)
    numbers = [
        *(package.TTL_PENDING_SECONDS, package.TTL_TERMINATED_SECONDS),
        *(package.TTL_MAX_JOB_AGE_SECONDS, package.POLL_INTERVAL_SECONDS),
        *(package.MAX_JOBS, package.MIN_FILE_SIZE_KB, package.DEFAULT_COMPUTE_TIMEOUT_SECONDS),
    ]
    assert numbers == [604800, 3600, 15552000, 300, 100000, 4, 300.0]
    assert package.STATE_TIMEOUT == "timeout"
    assert (config.STATE_NO_LOG, config.MODULE_FR_ONLY) == ("no_log", "fr_only")
    assert (*("log_analyzer", "log_fr_analyzer"),) == (
        config.MODULE_LOG_ANALYZER,
        config.MODULE_LOG_FR_ANALYZER,
    )
    assert (config.DEFAULT_LLM_MODEL, config.DEFAULT_LLM_BASE_URL) == ("", "")
    status = {code.value: code.http_status for code in package.ErrorCode}
    assert status == {
        **dict.fromkeys(("invalid_path", "invalid_parameter", "not_regular", "empty_file"), 400),
        **dict.fromkeys(("outside_root", "not_readable", "logs_dir_not_readable"), 403),
        **dict.fromkeys(("not_found", "fr_dump_not_found"), 404),
        "job_limit_reached": 503,
        "internal_error": 500,
    }
    assert config.drop_none_values({"a": None, "b": 0}) == {"b": 0}
    assert config.llm_runtime_overrides(top_p=0.5) == {"top_p": 0.5}


def test_types_of_results():
    """Results have the documented defaults, and their JSON objects all of their fields."""
    advice = package.AttributionRecommendation()
    assert (advice.action, advice.reason, advice.source) == ("UNKNOWN", "", "")
    cycle = package.LogAnalysisCycleResult(None).to_payload()
    assert (cycle["status"], cycle["wl_restart"], cycle["wl_restart_count"]) == (
        *("completed", 0, None),
    )
    assert cycle["candidate_recommendation"] == {"action": "UNKNOWN", "source": ""}
    split = package.LogAnalysisSplitlogResult(None).to_payload()
    assert (split["mode"], split["sched_restarts"], split["log_file"]) == ("splitlog", 0, "")
    submitted = package.LogAnalyzerSubmitResult(True, "/l")
    assert submitted.to_payload()["mode"] == "single"
    preview = package.LogAnalyzerFilePreview("text", "/l")
    assert (preview.content, preview.path) == ("text", "/l")
    assert package.LogAnalyzerConfig("/l").allowed_root == "/l"
    with pytest.raises(ConfigError, match="absolute"):
        package.LogAnalyzerConfig("l")
    error = package.LogAnalyzerError(package.ErrorCode.NOT_FOUND, "no /l")
    assert (error.error_code, error.message, str(error)) == (
        *(package.ErrorCode.NOT_FOUND, "no /l", "not_found: no /l"),
    )
    assert isinstance(error, package.LogAnalyzerOutcome)
    assert types.LogSageAnalysisResult([]).recommendation == advice
    words = (
        *(types.RECOMMENDATION_STOP, types.RECOMMENDATION_RESTART, types.RECOMMENDATION_CONTINUE),
        *(types.RECOMMENDATION_UNKNOWN, types.RECOMMENDATION_TIMEOUT),
    )
    assert set(words) == types.RECOMMENDATION_ACTIONS
    found = package.Job("/l")
    assert (found.mode, found.files) == (package.JobMode.PENDING, [])
    assert [mode.value for mode in package.JobMode] == ["pending", "single", "splitlog"]
    info = package.FileInfo("/l", 3)
    assert (info.cycle, info.is_analyzed, job.FileInfo) == (3, False, package.FileInfo)
    entry = coalescing_types.CacheEntry(7, 1.0)
    assert package.coalesced_from_cache(entry) == package.LogAnalysisCoalesced(7, from_cache=True)


def test_recommendations_as_payloads(tmp_path):
    """A recommendation becomes `{"action", "source"}`; items become results and record fields."""
    log = tmp_path / "a.log"
    log.write_text(OOM)
    item = engine.analyze(log).to_item()
    assert (item.action, item.checkpoint_saved_flag, item.secondary_issues) == ("STOP", 0, [])
    assert item.auto_resume.startswith("STOP")
    assert item.auto_resume_explanation.count("gpu.oom") == 1
    assert "line 1" in item.attribution_text
    advice = llm_output.logsage_recommendation([item], source="s")
    assert llm_output.recommendation_payload(advice) == {"action": "STOP", "source": "s"}
    fields = llm_output.log_fields_for_dataflow_record([item])
    assert fields["s_primary_issues"] == "gpu.oom"
    payload = utils.log_analyzer_result_payload([item], "m")
    assert (payload["module"], payload["recommendation"]["source"]) == ("m", "m")
    other = dataclasses.replace(item, action="RESTART")
    chosen = utils.selected_log_analyzer_cycle_payload({**payload, "state": "x"}, other)
    assert (chosen["recommendation"]["action"], chosen["state"]) == ("RESTART", "x")


def test_requests_in_full():
    """Routes, names of parameters, headers, bodies and queries are those of the service."""
    names = (
        *(http_api.PARAM_LOG_PATH, http_api.PARAM_USER, http_api.PARAM_JOB_ID),
        *(http_api.PARAM_CYCLE_ID, http_api.PARAM_ANALYSIS_INTENT),
    )
    body = http_api.log_submit_payload(
        "/l", user="u", job_id="7", cycle_id=2, analysis_intent=" Terminal "
    )
    assert [body[name] for name in names] == ["/l", "u", "7", 2, "terminal"]
    query = http_api.log_result_params("/l", file="f", wl_restart=1, wait=False)
    names = (http_api.PARAM_FILE, http_api.PARAM_WL_RESTART, http_api.PARAM_WAIT)
    assert [query[name] for name in names] == ["f", "1", "false"]
    assert (http_api.ROUTE_LOGS, http_api.ROUTE_HEALTHZ) == ("/logs", "/healthz")
    assert http_api.ACCEPT_JSON_HEADERS == {"Accept": "application/json"}
    intents = (
        *(progressive.ANALYSIS_INTENT_TRACK_ONLY, progressive.ANALYSIS_INTENT_PROGRESSIVE),
        progressive.ANALYSIS_INTENT_TERMINAL,
    )
    assert [progressive.normalize_analysis_intent(x) for x in ("", *intents)] == [
        *("track_only", "track_only", "progressive", "terminal"),
    ]
    started = progressive.ProgressiveStartResult(progressive.STATUS_STARTED, handle=3)
    assert (started.status, started.message, started.handle) == ("started", "", 3)
    assert (progressive.STATUS_FAILED, progressive.STATUS_UNSUPPORTED) == ("failed", "unsupported")
    assert progressive.PROGRESSIVE_START_TOOL == "log_analyzer_progressive_start"


def test_texts_of_a_reply():
    """A reply is shown in one line, as long as was asked for, without control characters."""
    payload = {
        "status": "completed",
        "result": {"result_id": "0123456789abcdef0123", "justification": "a\x1b[31m\n" + "b" * 300},
        "recommendation": {"action": "STOP"},
    }
    reply = client_response.parse_attrsvc_response(payload, log_path="/l")
    assert isinstance(reply, package.AttrSvcResult)
    assert reply.result_id_preview() == "0123456789abcdef"
    assert reply.result_id_preview(4) == "0123"
    assert len(reply.attribution_preview(50)) <= 60
    summary = reply.format_summary("x: ", preview_chars=10)
    assert summary.startswith("x: completed: STOP (")
    assert "\x1b" not in summary + reply.format_log_message(10)
    assert package.recommendation_should_stop(reply.recommendation)
    assert client_response.AttrSvcResult().format_summary() == "unknown: UNKNOWN"


def test_names_of_paths(caplog):
    """Cycle and job are found by the public expressions; a path without a job is told once."""
    assert log_path_metadata.CYCLE_NUM_PATTERN.search("/x/a_CYCLE12.LOG")[1] == "12"
    found = [pattern.search("/x/slurm-9.out") for pattern in log_path_metadata.JOB_ID_PATTERNS]
    assert [match[1] for match in found if match] == ["9"]
    with caplog.at_level("WARNING", "nvrx"):
        log_path_metadata.extract_job_metadata("/x/a.log", warn_on_missing_job_id=False)
        assert not caplog.records
        log_path_metadata.extract_job_metadata("/x/a.log")
        assert "/x/a.log" in caplog.text


def test_keys_and_tokens(monkeypatch, tmp_path):
    """A token comes from its variable, a named file or the known files, in this order."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SLACK_BOT_TOKEN", "SLACK_BOT_TOKEN_FILE", "LLM_API_KEY", "LLM_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert api_keys.load_slack_bot_token() == ""
    (tmp_path / ".slack_token").write_text("second\n")
    assert api_keys.load_slack_bot_token() == "second"
    (tmp_path / ".slack_bot_token").write_text("first\n")
    assert api_keys.load_slack_bot_token() == "first"
    (tmp_path / "named").write_text("named\n")
    monkeypatch.setenv("SLACK_BOT_TOKEN_FILE", str(tmp_path / "named"))
    assert api_keys.load_slack_bot_token() == "named"
    monkeypatch.setenv("SLACK_BOT_TOKEN", "own")
    assert api_keys.load_slack_bot_token() == "own"
    for path in reversed(api_keys.DEFAULT_LLM_API_KEY_PATHS):
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
        assert api_keys.load_llm_api_key() == path
        assert path in api_keys.llm_api_key_help_text()
    text = api_keys.llm_api_key_missing_message(include_empty=True, suffix=".")
    assert "empty" in text
    assert text.endswith(".")


def test_dumps_in_all_their_forms(tmp_path, capsys):
    """Groups, health and results are shown; every part of the pipeline runs by itself."""
    made = simulated.make_job("host_stuck", 16, 2)  # one whose dumps hold what has ended, too
    made.dumps[0]["health_check_results"] = {"gpu": {"status": "Failed", "output": "Xid 79\x1b"}}
    folder = str(simulated.write(made, tmp_path / "fr"))
    with fr_attribution.CollectiveAnalyzer({"fr_path": folder}) as trace:
        text = asyncio.run(trace.preprocess_FR_dumps())
        trace.print_pg_configs()
        trace.print_node_health_status()
        shown = capsys.readouterr().err
        assert "default_pg" in shown
        assert "gpu: Failed Xid 79" in shown
        assert "\x1b" not in shown
        analysis = asyncio.run(trace.collective_analysis(text))
        assert analysis.endswith(text)
        result, state = asyncio.run(trace.print_output(analysis))
        assert result["hanging_ranks"] == f"hanging ranks: {made.guilty}"
        assert state is base.AttributionState.CONTINUE
        done = next(ops for ops in trace.analyze_matches()[0].values() if ops)[0]
    names = [field.name for field in dataclasses.fields(fr_attribution.Collective)]
    assert names[:5] == ["record_id", "file_id", "collective_seq_id", "p2p_seq_id", "pg_id"]
    assert (done.state, len(names)) == ("completed", 16)
    fr_attribution.eprint("a", 1)
    assert capsys.readouterr().err == "a 1\n"
    appendix = fr_support.fr_markdown_appendix(
        dump_path="/d", analysis_text="t", hanging_ranks="hanging ranks: [2]"
    )
    assert "2" in appendix
    log = tmp_path / "job.log"
    log.write_text(f"{fr_support.FR_DUMP_PATH_ENV}={folder}/_dump_\n")
    assert fr_support.FR_DUMP_PATH_LOG_LINE_PATTERN.search(log.read_text())[1].startswith(folder)
    assert package.TraceAnalyzer().discover_fr_dump_path(str(log)) == f"{folder}/_dump_"
    late = "\n" * fr_support.FR_DUMP_PATH_LOG_SCAN_LINES + log.read_text()
    log.write_text(late)
    assert package.TraceAnalyzer().discover_fr_dump_path(str(log)) is None
    found = asyncio.run(fr_support.analyze_fr_dump(folder))
    fields = fr_support.fr_fields_for_dataflow_record(folder, found)
    assert fields["s_hanging_ranks"] == found.hanging_ranks
    assert fields["s_fr_analysis"] == found.analysis_text


def test_collectors_of_traces(tmp_path):
    """The collector that hung jobs use is the one of nvrx-common, and saves a rank's dump."""
    pytest.importorskip("torch")

    class Own(trace_collector.TraceCollector):
        def collect(self):
            return self.path

    assert Own("/p").collect() == "/p"
    with pytest.raises(TypeError):
        trace_collector.TraceCollector("/p")
    file = trace_collector.TorchFRTraceCollector(str(tmp_path), checks={}).collect()
    assert fr_support.fr_path_resolvable_for_collective_analyzer(file)
    assert json.loads(Path(file).read_text())["version"]


def test_steps_of_a_pipeline():
    """Steps can be replaced, checked and awaited alone; a pool that was given is not closed."""

    def read(args) -> str:
        return args["text"]

    def count(text: str) -> int:
        return len(text)

    def show(n: int) -> tuple:
        return n, base.AttributionState.CONTINUE

    with ThreadPoolExecutor(1) as pool:
        made = base.NVRxAttribution(read, count, show, thread_pool=pool)
        assert asyncio.run(made.do_attribution("abc")) == 3
        assert asyncio.run(made.output_handler(3)) == (3, base.AttributionState.CONTINUE)
        steps = {"preprocess_input": read, "attribution": count, "output_handler": show}
        made.inspect_type_consistency(steps)
        made.register_attr_pipeline({**steps, "attribution": lambda text: 2 * len(text)})
        assert made.run_sync({"text": "abc"})[0] == 6
        for wrong in ({**steps, "output_handler": read}, {"attribution": count}):
            with pytest.raises(ValueError, match=r"pipeline lacks|attribution returns"):
                made.register_attr_pipeline(
                    {**wrong, "output_handler": count} if len(wrong) == 3 else wrong
                )
        made.close()
        assert pool.submit(len, "ab").result() == 2
    loop = base.NVRxAttribution.get_shared_loop()
    assert base.NVRxAttribution.get_shared_loop() is loop
    base.NVRxAttribution.reset_thread_event_loop()
    assert loop.is_closed()


def test_a_verdict_at_any_time():
    """A scanner gives verdicts while it is fed; its last line counts when it is finished."""
    scanner = engine.LogScanner()
    assert scanner.snapshot().action == "UNKNOWN"
    scanner.feed(b"0: step: 1 loss: 0.5\n" + OOM.strip().encode())
    assert scanner.snapshot().reason_code != "gpu.oom"
    verdict = scanner.finish()
    assert verdict.to_dict()["reason_code"] == "gpu.oom"
    assert verdict.to_restart_agent_response()["decision"] == "RESTART"
    assert verdict.to_item().primary_issues == ["gpu.oom"]
    assert engine.load_registry().code("gpu.oom").budget == 1
    assert engine.analyze(io.BytesIO(OOM.encode())).reason_code == "gpu.oom"


def test_analyzer_and_its_counts(tmp_path):
    """Counts, jobs and previews of an analyzer; with the mode `off` no log is read early."""
    log = tmp_path / "a.log"
    log.write_text(OOM)

    async def ask():
        found = Analyzer(str(tmp_path), True, times=FAST)
        await found.submit(str(log))
        assert (found.get_stats()["jobs"], found.get_stats()["cached"]) == (1, 0)
        assert found.get_all_jobs()[0]["status"] == "pending"
        assert found.read_file_preview(str(log)).content == OOM
        await found.analyze(str(log))
        assert found.get_stats()["cached"] == 1
        await found.shutdown_async()
        found.shutdown()
        settings = package.AttributionControllerConfig(
            str(tmp_path),
            package.AttributionAnalysisConfig(times=FAST),
            package.AttributionCacheConfig(),
            package.AttributionPostprocessingConfig(),
            "off",
            package.AttributionCredentialsConfig(),
        )
        controller = package.AttributionController(settings)
        await controller.start()
        await controller.submit_log(str(log), analysis_intent="progressive")
        assert controller.get_inflight()["count"] == controller.get_stats()["growing"] == 0
        assert controller.get_submitted()["keys"] == [str(log)]
        assert controller.get_all_jobs()[0]["log_path"] == str(log)
        assert controller.read_file_preview(str(log)).path == str(log)
        found = await controller.analyze_log(str(log))
        assert found.recommendation["reason"].count("gpu.oom") == 1
        assert controller.get_cache()["count"] == 1
        controller.save_cache()
        assert controller.load_cache() == 0
        assert controller.status()["status"] == "ok"
        await controller.shutdown_async()
        controller.shutdown()

    asyncio.run(ask())
    assert analyzer.CompletedAnalysis.__dataclass_fields__.keys() >= {"verdict", "payload"}


def test_coalescer_shows_what_it_has():
    """Submitted, running and kept keys are shown; entries say who waits."""

    async def ask():
        coalescer = RequestCoalescer()
        coalescer.track_submission("/a")
        assert coalescer.get_submitted() == package.SubmittedResult(1, ["/a"])
        release = asyncio.Event()

        async def work():
            await release.wait()
            return {"n": 1}

        waiting = asyncio.ensure_future(coalescer.get_or_compute("/a", work))
        await asyncio.sleep(0)
        assert coalescer.get_inflight() == package.InflightResult(1, ["/a"])
        running = coalescer._inflight["/a"]
        assert isinstance(running, coalescing_types.InFlightEntry)
        assert running.waiters == 1
        release.set()
        assert (await waiting).value == {"n": 1}
        assert coalescer.get_cache() == package.CacheResult(1, ["/a"])
        assert coalescer.peek("/a").value == {"n": 1}
        stats = coalescer.get_stats()
        assert isinstance(stats, package.StatsResult)
        assert stats.stats == package.CoalescerStats(misses=1)
        other = package.RequestCoalescer()
        assert other.import_cache(coalescer.export_cache()) == 1

    asyncio.run(ask())


def test_pipeline_modes(tmp_path):
    """Only what the mode names is looked at, through the functions that were given."""
    log = tmp_path / "a.log"
    log.write_text(OOM)
    mode = package.AnalysisPipelineMode

    async def rules(path):
        return [engine.analyze(path).to_item()]

    async def traces(path):
        return package_result

    package_result = fr_support.FRAnalysisResult("t", "hanging ranks: [1]")

    async def prose(log_result, fr_result):
        return f"{log_result['module']} {fr_result.hanging_ranks}"

    def run(**given):
        return asyncio.run(package.run_attribution_pipeline(str(log), **given))

    only = run(mode=mode.LOG_ONLY, run_logsage=rules, fr_dump_path_override="/d")
    assert isinstance(only, package.CombinedAnalysisResult)
    assert (only.fr_dump_path, only.fr_analysis) == (None, None)
    both = run(
        mode=mode.LOG_AND_TRACE_WITH_LLM,
        discover_fr_dump_path=lambda _: "/d",
        run_fr_analysis=traces,
        run_log_fr_analyzer_mcp=prose,
    )
    assert both.llm_merged_summary == "log_analyzer hanging ranks: [1]"
    assert (both.fr_dump_path, both.processing_time >= 0) == ("/d", True)
    assert both.analysis_completed_at_ms > 0
    with pytest.raises(package.FrDumpPathNotFoundError):
        run(mode="trace_only", discover_fr_dump_path=lambda _: None)
    assert analysis_pipeline.AnalysisPipelineMode("trace_only") is mode.TRACE_ONLY


def test_results_of_other_pipelines():
    """A text, a pair and a list of pairs give text and state; a text alone never stops a job."""
    state = base.AttributionState
    assert llm_merge.unpack_run_result(("x", state.STOP)) == ("x", state.STOP)
    assert llm_merge.unpack_run_result([("STOP", state.STOP)])[1] is state.CONTINUE
    assert llm_merge.unpack_run_result(None) == ("", state.CONTINUE)


def test_old_arguments_of_the_log_analyzer(tmp_path):
    """Arguments of the model-driven analyzer are taken and change nothing."""
    log = tmp_path / "a.log"
    log.write_text(OOM)
    old = {"repeated_amount": 3, "stop_accumulating_count": 3}
    old |= {"logs_minutes_before_job_end": 20, "chunks_per_time": 5, "model": "m"}
    with nvrx_logsage.NVRxLogAnalyzer({"log_path": str(log), **old}) as found:
        assert found.run_sync({})[1] is base.AttributionState.STOP


def test_exports(monkeypatch):
    """A record is posted by the poster that was given; addresses are checked before."""
    posted = []

    class Poster:
        def post(self, record):
            posted.append(record)
            return True

    assert pipeline.post_analysis_items(Poster(), [], log_path="/l", cluster="c")
    assert (posted[0]["s_log_path"], posted[0]["s_recommendation_action"]) == ("/l", "UNKNOWN")
    assert post_backend.check_export_url("https://h/x") == "https://h/x"
    with pytest.raises(ConfigError):
        post_backend.HttpPoster("ftp://h/x")


def test_parts_of_the_slurm_monitor(monkeypatch, caplog):
    """A submission that is refused is final, one without an answer is not; a verdict is logged."""
    replies = []

    class Client:
        is_reachable = True

        def post(self, submission):
            self.said = submission
            return replies.pop(0)

        def get(self, query):
            self.asked = query
            return replies.pop(0)

    client, found = Client(), models.MonitoredJob("7", "ada", "train", "/l")
    replies[:] = [(200, {}), (503, {}), (403, {"message": "outside"})]
    sent = [job_handlers.submit_log(client, found, "terminal", ("x",)) for _ in range(3)]
    assert sent == [True, None, False]
    assert (client.said.evidence, found.problem) == (("x",), "status 403: outside")
    verdict = {"status": "completed", "recommendation": {"action": "STOP", "reason": "r"}}
    replies[:] = [(200, {"status": "in_flight"}), (404, {}), (200, verdict)]
    assert job_handlers.fetch_results(client, found) is None
    found.is_terminal_submitted = True
    assert job_handlers.fetch_results(client, found) is None
    assert not found.is_terminal_submitted
    result = job_handlers.fetch_results(client, found)
    with caplog.at_level("INFO", "nvrx"):
        job_handlers.log_attribution_result(found, result)
    assert (found.action, found.reason, "STOP: r" in caplog.text) == ("STOP", "r", True)
    assert status_server.DEFAULT_STATUS_HOST == "127.0.0.1"
    monkeypatch.setenv("PATH", "/nowhere")
    for make in (slurm.SlurmClient, lambda: smonsvc.SlurmJobMonitor("unix:///s")):
        with pytest.raises(ConfigError, match="squeue"):
            make()
    assert models.MonitorState().problems() == []


def test_parts_of_the_mcp_server(monkeypatch):
    """Modules are described by their metadata; the command of a server is a program or Python."""
    made = registry.AttributionModuleRegistry(cache_max_entries=4)
    made.register("m", dict, "d", {"properties": {}}, {}, requires_llm=True, dependencies=["x"])
    known = made.get_module_metadata("m")
    assert isinstance(known, registry.ModuleMetadata)
    assert (known.requires_llm, tuple(known.dependencies)) == (True, ("x",))
    monkeypatch.setattr(mcp_client.shutil, "which", lambda _: None)
    command = mcp_client.get_server_command(log_level="ERROR")
    assert command[1] == "-m"
    assert command[-2:] == ["--log-level", "ERROR"]
    client = mcp_client.create_mcp_client(mcp_server_log_level="ERROR")
    assert isinstance(client, mcp_client.NVRxMCPClient)
    with pytest.raises(ConnectionError, match="not connected"):
        asyncio.run(client.list_tools())
    made.cache_result_by_id("m", "1" * 64, {"x": 1})
    assert made.get_cached_result_by_id("1" * 64) == {"x": 1}
    with pytest.raises(SystemExit) as ended:
        server_launcher.main(["--help"])
    assert ended.value.code == 0


def test_the_application_in_this_process(tmp_path):
    """Settings of an environment make an application whose routes answer, without a socket."""
    pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from nvidia_resiliency_ext.services import attrsvc

    environ = {
        "NVRX_ATTRSVC_ALLOWED_ROOT": str(tmp_path),
        "NVRX_ATTRSVC_ENDPOINT": "localhost:9",
        "NVRX_ATTRSVC_LOG_LEVEL": "warning",
        "NVRX_ATTRSVC_COMPUTE_TIMEOUT": "9",
        "NVRX_ATTRSVC_ANALYSIS_BACKEND": "mcp",
        "NVRX_ATTRSVC_PROGRESSIVE_ANALYSIS": "off",
        "NVRX_ATTRSVC_CLUSTER_NAME": "c",
        "NVRX_ATTRSVC_CACHE_FILE": str(tmp_path / "cache.json"),
        "NVRX_ATTRSVC_CACHE_GRACE_PERIOD_SECONDS": "8",
        "NVRX_ATTRSVC_RATE_LIMIT_ANALYZE": "2/hour",
    }
    names = {
        "LOG_QUIET_SECONDS": 0.1,
        "LOG_MAX_WAIT_SECONDS": 2.0,
        "LOG_POLL_SECONDS": 0.3,
        "PRE_END_POLL_SECONDS": 4.0,
        "ACTIVE_IDLE_SECONDS": 5.0,
        "MAX_ACTIVE_STATES": 6,
        "MAX_COMPLETED_RESULTS": 7,
    }
    environ |= {f"NVRX_ATTRSVC_RESTART_AGENT_{name}": str(v) for name, v in names.items()}
    settings = attrsvc.setup(environ)
    assert settings.service_endpoint == attrsvc.ServiceEndpoint("localhost", 9)
    made = settings.controller_config()
    assert dataclasses.astuple(made.analysis.times) == (0.1, 2.0, 0.3, 4.0, 5.0)
    assert (made.analysis.max_growing, made.cache.max_results) == (6, 7)
    assert (made.cache.grace_period_seconds, made.analysis.compute_timeout) == (8.0, 9.0)
    assert (made.postprocessing.cluster_name, made.progressive) == ("c", "off")
    environ["NVRX_ATTRSVC_PROGRESSIVE_ANALYSIS"] = "all_explicit"
    for text, mode in (("1", "all_explicit"), ("0", "off")):
        environ["NVRX_ATTRSVC_RESTART_AGENT_PROGRESSIVE_ENABLED"] = text
        assert attrsvc.Settings.from_environ(environ).controller_config().progressive == mode

    async def adapted():
        adapter = attrsvc.AttributionHttpAdapter(made)
        log = tmp_path / "a.log"
        log.write_text(OOM)
        submitted = await adapter.submit({"log_path": str(log), "analysis_intent": "terminal"})
        found = await adapter.result(str(log), None, None, wait=True)
        await adapter.controller.shutdown_async()
        return submitted["submitted"], found["result"]["result"][0]["action"]

    assert asyncio.run(adapted()) == (True, "STOP")
    with TestClient(attrsvc.create_app(settings)) as client:
        assert client.get("/healthz").json()["status"] == "ok"
        path = str(tmp_path / "a.log")
        assert client.post("/logs", json={"log_path": path}).json()["normalized_path"] == path
        query = {"log_path": path, "indent": "3"}
        reply = client.get("/logs", params=query)
        assert reply.text.startswith('{\n   "')
        legacy = reply.json()["result"]
        assert set(legacy) == {"module", "result", "recommendation"}
        client.get("/logs", params=query)
        assert client.get("/logs", params=query).status_code == 429
