# SPDX-License-Identifier: Apache-2.0
"""Types, coalescing, controller and exports under the names that programs import."""

import asyncio
import http.server
import json
import os
import threading

import attribution_traces
import pytest

import nvidia_resiliency_ext.attribution as package
from nvidia_resiliency_ext.attribution import _api, api_keys, engine
from nvidia_resiliency_ext.attribution._live.history import JobHistory
from nvidia_resiliency_ext.attribution._live.journal import SubmissionJournal
from nvidia_resiliency_ext.attribution._live.sessions import SessionTimes
from nvidia_resiliency_ext.attribution.analyzer import Analyzer
from nvidia_resiliency_ext.attribution.coalescing import RequestCoalescer
from nvidia_resiliency_ext.attribution.controller import (
    AttributionAnalysisConfig,
    AttributionCacheConfig,
    AttributionController,
    AttributionControllerConfig,
    AttributionCredentialsConfig,
    AttributionPostprocessingConfig,
)
from nvidia_resiliency_ext.attribution.orchestration import (
    analysis_pipeline,
    client_response,
    config,
    http_api,
    llm_output,
    log_path_metadata,
    progressive,
    slurm_parser,
    types,
    utils,
)
from nvidia_resiliency_ext.attribution.postprocessing import ResultPoster, build_dataflow_record
from nvidia_resiliency_ext.attribution.postprocessing.posting_markdown import (
    format_posting_markdown_body,
)
from nvidia_resiliency_ext.attribution.postprocessing.slack import (
    format_slack_text,
    should_notify_slack,
)
from nvidia_resiliency_ext.attribution.trace_analyzer import fr_support
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

OOM = "torch.OutOfMemoryError: CUDA out of memory.\n"
STEP = "iteration {}/ 500 | consumed samples: 64 | lm loss: 2.1E+00 |\n"
FAST = SessionTimes(quiet_s=0.2, poll_s=0.02, growing_poll_s=0.02)


def test_all_public_names_resolve():
    """Each name of the package comes from its module, and only when it is asked for."""
    for name in _api.__all__:
        assert getattr(package, name) is not None
    assert package.RESP_WL_RESTART_COUNT == "wl_restart_count"
    assert package.ErrorCode("outside_root").http_status == 403
    assert package.TTL_PENDING_SECONDS == 604800


def test_model_settings_leave_out_what_is_not_set():
    """Overrides hold set keys only; the full set falls back to defaults without an endpoint."""
    cfg = config.LogSageExecutionConfig(llm_model="m", llm_top_p=0.5)
    assert cfg.llm_runtime_overrides() == {"model": "m", "top_p": 0.5}
    assert cfg.llm_endpoint_overrides() == {"model": "m"}
    assert cfg.pipeline_llm_overrides() == {"llm_model": "m", "llm_top_p": 0.5}
    resolved = config.resolved_llm_runtime_kwargs({"model": "m"})
    assert (resolved["base_url"], resolved["max_tokens"]) == ("", 8192)


def test_paths_outside_of_the_root_are_refused(tmp_path):
    """Relative, foreign, missing, linked and special paths get the error code of their kind."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("x")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "empty.log").touch()
    os.mkfifo(root / "pipe")
    cases = {
        "relative.log": "invalid_path",
        f"{root}/a\0b": "invalid_path",
        f"{tmp_path}/secret": "outside_root",
        f"{root}/link": "outside_root",
        f"{root}/../secret": "outside_root",
        f"{root}/none.log": "not_found",
        f"{root}/pipe": "not_regular",
        str(root): "not_regular",
        f"{root}/empty.log": "empty_file",
    }
    for path, code in cases.items():
        with pytest.raises(types.LogAnalyzerError) as caught:
            utils.validate_log_path(path, str(root), reject_empty=True)
        assert caught.value.error_code.value == code, path
    later = utils.validate_log_path(f"{root}/later.log", str(root), must_exist=False)
    assert later == f"{root}/later.log"
    # Swapped between check and open: the link is not followed.
    with pytest.raises(types.LogAnalyzerError, match="outside_root"):
        utils.open_log(f"{root}/link", str(root))


def test_job_and_cycle_in_a_path():
    """Job number and cycle are taken from the documented forms of names."""
    assert log_path_metadata.extract_job_metadata("/x/a_55_date_1_cycle3.log") == (
        log_path_metadata.JobMetadata("55", 3)
    )
    for path in ("/x/job_9/a.log", "/x/slurm-9.out"):
        assert log_path_metadata.extract_job_metadata(path).job_id == "9"
    for path in ("/x/1234567.out", "/x/run_1234567.log"):
        assert log_path_metadata.extract_job_metadata(path).job_id == "1234567"
    assert log_path_metadata.extract_job_metadata("/x/a.log") == (
        log_path_metadata.JobMetadata("", None)
    )


def test_output_of_slurm(tmp_path):
    """The last whole block names the directory; its files are ordered by cycle and date."""
    block = "<< START PATHS >>\nLOGS_DIR={}\n<< END PATHS >>\n"
    text = block.format("/old") + block.format(tmp_path) + "Requeue=1\n<< START PATHS >>\n"
    found = slurm_parser.SlurmParser.parse(text)
    assert (found.logs_dir, found.restart_count, found.can_restart) == (str(tmp_path), 1, True)
    assert slurm_parser.parse_slurm_output("Writing logs to /w\n").logs_dir == "/w"
    for name in ("j_date_2_cycle1.log", "j_date_1_cycle1.log", "j_cycle0.log", "other.txt"):
        (tmp_path / name).touch()
    names = [os.path.basename(i.path) for i in slurm_parser.SplitlogTracker(str(tmp_path)).files()]
    assert names == ["j_cycle0.log", "j_date_1_cycle1.log", "j_date_2_cycle1.log"]


def test_replies_and_recommendations():
    """Odd replies are no recommendation; of several items the most severe action counts."""
    for odd in (None, 7, [], {"recommendation": 3}, {"recommendation": {"action": []}}):
        assert client_response.parse_attrsvc_response(odd).should_stop is False
    good = {"status": "completed", "result": {"justification": "a\nb"}, "recommendation": {}}
    good["recommendation"] = {"action": "stop", "reason": "r", "source": "s"}
    reply = client_response.parse_attrsvc_response(good, log_path="/l")
    assert (reply.should_stop, reply.attribution_preview()) == (True, "a b")
    assert reply.format_log_message() == "attribution of /l: completed: STOP (a b)"
    make = lambda action: types.RawAnalysisResultItem("r", "h", action, "a", 0, action)  # noqa: E731
    items = [make("CONTINUE"), make("RESTART"), make("STOP")]
    assert llm_output.logsage_recommendation(items, source="x").action == "STOP"
    assert llm_output.logsage_recommendation([]).action == "UNKNOWN"
    assert types.normalize_recommendation_action("nonsense") == "UNKNOWN"
    for head, action in (
        ("STOP - DONT RESTART IMMEDIATE", "STOP"),
        ("RESTART IMMEDIATE", "RESTART"),
        ("ERRORS NOT FOUND", "CONTINUE"),
        ("NO LOGS", "UNKNOWN"),
        ("LLM FAILURE", "UNKNOWN"),
        ("APPLICATION DONE", "STOP"),
        ("SLURM STEP CANCELLED DUE TO PREEMPTION", "RESTART"),
        ("SLURM JOB CANCELLED DUE TO TIME LIMIT", "STOP"),
        ("SLURM STEP CANCELLED", "RESTART"),
    ):
        old = types.RawAnalysisResultItem("r", head, "", "a", 0, "")
        assert llm_output.logsage_recommendation([old]).action == action, head
    assert llm_output.logsage_recommendation([make("unknown")]).action == "UNKNOWN"
    payload = utils.nvrx_run_result_to_log_dict((items[1:2], None), "/l")
    assert payload["recommendation"] == {"action": "RESTART", "source": "log_analyzer"}
    with pytest.raises(RuntimeError, match="str"):
        utils.nvrx_run_result_to_log_dict("text", "/l")


def test_requests_through_any_client():
    """Payload, parameters and headers reach a client that looks like httpx."""
    calls = []

    class Client:
        def post(self, route, **given):
            calls.append((route, given["json"]))

        def get(self, route, **given):
            calls.append((route, given["params"]))

    http_api.post_log(Client(), "/l", job_id="7", cycle_id=2, analysis_intent="terminal")
    http_api.get_log_response(Client(), "/l", wl_restart=1, wait=False)
    assert calls[0][1]["analysis_intent"] == "terminal"
    assert calls[1] == ("/logs", {"log_path": "/l", "wait": "false", "wl_restart": "1"})
    with pytest.raises(ValueError, match="analysis_intent"):
        progressive.normalize_analysis_intent("soon")


def test_coalescer_computes_once():
    """Waiters share a computation, a cancelled one ends nobody's, and failures are not kept."""

    async def scenario():
        coalescer = RequestCoalescer(compute_timeout=30)
        release, started, count = asyncio.Event(), asyncio.Event(), 0

        async def work():
            nonlocal count
            count += 1
            started.set()
            await release.wait()
            return count

        asks = [asyncio.ensure_future(coalescer.get_or_compute("/k", work)) for _ in range(3)]
        await started.wait()
        asks[0].cancel()
        await asyncio.sleep(0)
        release.set()
        assert [(await ask).value for ask in asks[1:]] == [1, 1]
        assert (await coalescer.get_or_compute("/k", work)).from_cache

        async def fail():
            raise OSError("no")

        for _ in range(2):
            with pytest.raises(OSError, match="no"):
                await coalescer.get_or_compute("/bad", fail)
        assert coalescer.get_stats().stats.failures == 2
        other = RequestCoalescer()
        assert other.import_cache({**coalescer.export_cache(), "x": {"odd": 1}}) == 1
        slow = RequestCoalescer(compute_timeout=0.05)
        with pytest.raises(TimeoutError, match="/slow"):
            await slow.get_or_compute("/slow", lambda: asyncio.sleep(60))

    asyncio.run(scenario())


def test_result_expires_with_its_file(tmp_path):
    """After the grace period a kept result counts only while the file is the same."""

    async def scenario():
        log = tmp_path / "a.log"
        log.write_text("x")
        coalescer = RequestCoalescer(grace_period_seconds=0)
        await coalescer.get_or_compute(str(log), lambda: asyncio.sleep(0, 1))
        await asyncio.sleep(0.01)
        assert coalescer.peek(str(log)) is not None
        log.write_text("longer")
        assert coalescer.peek(str(log)) is None

    asyncio.run(scenario())


def test_growing_log_gets_candidates_and_then_a_verdict(tmp_path):
    """While a job runs its log gives a candidate; its end gives the verdict, once."""
    log = tmp_path / "job_cycle0.log"

    async def scenario():
        done = []
        analyzer = Analyzer(str(tmp_path), True, times=FAST, on_complete=done.append)
        with pytest.raises(types.LogAnalyzerError, match="never submitted"):
            await analyzer.analyze(str(log))
        await analyzer.submit(str(log), job_id="1", cycle_id=0, analysis_intent="progressive")
        log.write_text(OOM)
        found = await analyzer.analyze(str(log), wait=False)
        assert (found.status, found.candidate_recommendation["action"]) == ("in_flight", "STOP")
        waiting = asyncio.ensure_future(analyzer.analyze(str(log)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        args = {"job_id": "1", "cycle_id": 0, "analysis_intent": "terminal"}
        await analyzer.submit(str(log), **args, log_complete=True)
        found = await asyncio.wait_for(waiting, 30)
        assert (found.status, found.recommendation["action"]) == ("completed", "STOP")
        assert found.result["schema_version"] == "restart_agent_response.v1"
        assert found.attribution["reason_code"] == "gpu.oom"
        await analyzer.submit(str(log), **args)
        assert (await analyzer.analyze(str(log))).status == "completed"
        assert len(done) == 1
        for other in ({**args, "cycle_id": 1}, {**args, "job_id": "2"}):
            with pytest.raises(types.LogAnalyzerError, match="was submitted"):
                await analyzer.submit(str(log), **other)
        with pytest.raises(types.LogAnalyzerError, match="has the log"):
            await analyzer.submit(str(tmp_path / "b.log"), **args)
        await analyzer.shutdown_async()

    asyncio.run(scenario())


def test_dumps_are_found_as_the_caller_says(tmp_path):
    """The trace analyzer that was given finds the dumps of a log and says what they mean."""
    hung = attribution_traces.make_job("host_stuck", 16, 1)
    folder = str(attribution_traces.write(hung, tmp_path / "elsewhere"))
    log = tmp_path / "a.log"
    log.write_text("hello\n")

    class Elsewhere(fr_support.TraceAnalyzer):
        def discover_fr_dump_path(self, log_path):
            return folder if log_path == str(log) else None

    async def scenario():
        done = []
        given = Elsewhere(str(tmp_path))
        analyzer = Analyzer(
            str(tmp_path), times=FAST, trace_analyzer=given, on_complete=done.append
        )
        await analyzer.submit(str(log), analysis_intent="terminal", log_complete=True)
        found = await analyzer.analyze(str(log))
        await analyzer.shutdown_async()
        return found, done[0]

    found, done = asyncio.run(scenario())
    assert (found.fr_dump_path, found.attribution["fr"]["guilty_ranks"]) == (folder, hung.guilty)
    assert str(hung.guilty) in done.fr_result.hanging_ranks


def test_dumps_of_few_jobs_are_analysed_at_once(tmp_path):
    """Many jobs that end together take turns: the dumps of each may fill gigabytes."""
    logs = [tmp_path / f"{number}.log" for number in range(6)]
    running: list[str] = []
    counts = []
    two_run = asyncio.Event()

    class Slow(fr_support.TraceAnalyzer):
        def discover_fr_dump_path(self, log_path):
            return log_path

        async def analyze_fr_dump(self, dump_path):
            running.append(dump_path)
            counts.append(len(running))
            if len(running) == 2:
                two_run.set()
            await asyncio.wait_for(two_run.wait(), 60)
            await asyncio.sleep(0.02)  # a third one would come meanwhile
            running.remove(dump_path)

    async def scenario():
        analyzer = Analyzer(str(tmp_path), times=FAST, trace_analyzer=Slow())
        for log in logs:
            log.write_text("hello\n")
            await analyzer.submit(str(log), analysis_intent="terminal", log_complete=True)
        await asyncio.gather(*(analyzer.analyze(str(log)) for log in logs))
        await analyzer.shutdown_async()

    asyncio.run(scenario())
    assert (len(counts), max(counts)) == (6, 2)


def test_verdict_does_not_wait_for_dumps_for_ever(tmp_path, caplog):
    """Dumps that take too long to analyse leave the verdict to the log, of later jobs too."""
    logs = [tmp_path / f"{number}.log" for number in range(3)]

    class Hung(fr_support.TraceAnalyzer):
        def discover_fr_dump_path(self, log_path):
            return f"{log_path}.dumps"

        async def analyze_fr_dump(self, dump_path):
            del dump_path
            await asyncio.Event().wait()

    async def scenario():
        analyzer = Analyzer(str(tmp_path), compute_timeout=6.0, times=FAST, trace_analyzer=Hung())
        for log in logs:
            log.write_text(OOM)
            await analyzer.submit(str(log), analysis_intent="terminal", log_complete=True)
        found = await asyncio.gather(*(analyzer.analyze(str(log)) for log in logs))
        await analyzer.shutdown_async()
        return found

    found = asyncio.run(scenario())
    assert [(one.status, one.recommendation["action"]) for one in found] == [
        ("completed", "STOP")
    ] * 3
    assert found[0].fr_dump_path == f"{logs[0]}.dumps"
    assert "0.log.dumps" in caplog.text


def test_analysis_that_took_too_long_has_failed_for_pollers(tmp_path):
    """Who does not wait is told of a timeout at once and for good; who waits has it tried again."""
    log = tmp_path / "a.log"
    log.write_text(OOM)
    release = threading.Event()

    class Slow(fr_support.TraceAnalyzer):
        def discover_fr_dump_path(self, log_path):
            del log_path
            release.wait(30)

    async def scenario():
        analyzer = Analyzer(str(tmp_path), compute_timeout=2.0, times=FAST, trace_analyzer=Slow())

        async def polled():
            found = await analyzer.analyze(str(log), wait=False)
            return (
                found.status,
                found.recommendation["action"],
                analyzer.get_all_jobs()[0]["status"],
            )

        await analyzer.submit(str(log), analysis_intent="terminal", log_complete=True)
        assert (await polled())[0] == "in_flight"
        await asyncio.wait([*analyzer._background])  # until the time is over
        assert await polled() == ("failed", "TIMEOUT", "failed")
        release.set()
        await asyncio.wait([analyzer._logs[str(log)].task])  # the log was read all the same
        assert await polled() == ("failed", "TIMEOUT", "failed")
        assert (await analyzer.analyze(str(log))).status == "completed"
        assert await polled() == ("completed", "STOP", "completed")
        await analyzer.shutdown_async()

    try:
        asyncio.run(scenario())
    finally:
        release.set()


def test_repeats_stop_across_cycles(tmp_path):
    """Cycles of one job that fail alike without progress end in STOP, though logs overlap."""

    async def scenario():
        analyzer = Analyzer(str(tmp_path), times=FAST)
        actions = []
        for cycle in range(4):
            log = tmp_path / f"job_cycle{cycle}.log"
            log.write_text(STEP.format(7) + "[rank0]: Segmentation fault (core dumped)\n")
            await analyzer.submit(str(log), analysis_intent="progressive")
            await analyzer.submit(str(log), analysis_intent="terminal", log_complete=True)
            result = await asyncio.wait_for(analyzer.analyze(str(log)), 30)
            actions.append(result.recommendation["action"])
        await analyzer.shutdown_async()
        return actions

    actions = asyncio.run(scenario())
    assert actions[0] == "RESTART"
    assert actions[-1] == "STOP"


def test_split_log(tmp_path):
    """A log that names a directory of cycle logs is answered for with these."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "j_cycle0.log").write_text(OOM)
    (logs / "j_cycle1.log").write_text(STEP.format(3))
    main_log = tmp_path / "slurm-1.out"
    main_log.write_text(f"<< START PATHS >>\nLOGS_DIR={logs}\n<< END PATHS >>\n")

    async def scenario():
        analyzer = Analyzer(str(tmp_path), times=FAST)
        submitted = await analyzer.submit(str(main_log))
        assert (submitted.mode, submitted.logs_dir) == ("splitlog", str(logs))
        first = await analyzer.analyze(str(main_log), wl_restart=0)
        assert (first.mode, first.recommendation["action"]) == ("splitlog", "STOP")
        last = await analyzer.analyze(str(main_log))
        assert last.log_file.endswith("j_cycle1.log")
        for wrong in ({"file": "none"}, {"wl_restart": 9}):
            with pytest.raises(types.LogAnalyzerError, match="of this job"):
                await analyzer.analyze(str(main_log), **wrong)
        await analyzer.shutdown_async()

    asyncio.run(scenario())


def test_journal_and_history_survive(tmp_path):
    """What was accepted and has no end is known after a kill; half a line costs itself only."""
    path = tmp_path / "journal.jsonl"
    journal = SubmissionJournal(str(path))
    journal.add({"log_path": "/a"})
    journal.add({"log_path": "/b"})
    journal.end("/a")
    journal.close()
    with path.open("a") as file:
        file.write('{"submitted": {"log_')
    again = SubmissionJournal(str(path))
    assert again.open_submissions == [{"log_path": "/b"}]
    again.close()
    kept = tmp_path / "history.jsonl"
    history = JobHistory(str(kept))
    log = tmp_path / "l"
    log.write_text(OOM)
    for number in range(12):
        history.add(f"/l{number}", "job", engine.analyze(log))
    again = JobHistory(str(kept))
    assert len(again.before("/new", "job")) == 10
    assert again.before("/l5", "job") == again.before("/new", "job")[:3]
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    lines[0]["log_end"]["size"] = "many"
    lines[1]["log_end"]["digest"] = None
    kept.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert len(JobHistory(str(kept)).before("/new", "job")) == 8


def test_history_of_a_service_is_read_and_not_written_by_others(tmp_path, caplog):
    """The program may evaluate a log by a service's history, and leaves that as it is."""
    log, kept = tmp_path / "l", tmp_path / "history.jsonl"
    log.write_text(STEP.format(7) + "[rank0]: Segmentation fault (core dumped)\n")
    JobHistory(str(kept)).add("/l0", "job", engine.analyze(log))
    before = kept.read_bytes()
    assert engine.analyze(log, history=kept, job_id="job").retry.used == 1
    assert kept.read_bytes() == before
    assert "history of a service" in caplog.text


def test_journal_of_a_long_life_is_bounded(tmp_path, monkeypatch):
    """A service that runs for long leaves out of its journal what has ended, and nothing else."""
    monkeypatch.setattr("nvidia_resiliency_ext.attribution._live.journal._REWRITE_BYTES", 4096)
    path = tmp_path / "journal.jsonl"
    journal = SubmissionJournal(str(path))
    journal.add({"log_path": "/kept"})
    for number in range(1000):
        journal.add({"log_path": f"/{number}"})
        journal.end(f"/{number}")
    journal.add({"log_path": "/newest"})
    journal.close()
    assert path.stat().st_size < 3 * 4096
    again = SubmissionJournal(str(path))
    assert again.open_submissions == [{"log_path": "/kept"}, {"log_path": "/newest"}]
    again.close()


def test_oldest_jobs_give_way(tmp_path, monkeypatch):
    """A service that has seen as many logs as it can know forgets old ones and takes the next."""
    monkeypatch.setattr("nvidia_resiliency_ext.attribution._live.jobs.MAX_JOBS", 4)

    journal = SubmissionJournal(str(tmp_path / "journal.jsonl"))

    async def scenario():
        analyzer = Analyzer(str(tmp_path), times=FAST, journal=journal)
        for number in range(10):
            await analyzer.submit(str(tmp_path / f"tracked{number}.log"))
        assert len(journal.open_submissions) <= 4
        for number in range(10):
            log = tmp_path / f"{number}.log"
            log.write_text(OOM)
            ended = {"analysis_intent": "terminal", "log_complete": True}
            await analyzer.submit(str(log), job_id=str(number), cycle_id=0, **ended)
            result = await asyncio.wait_for(analyzer.analyze(str(log)), 30)
            assert result.recommendation["action"] == "STOP"
        known = [job["job_id"] for job in analyzer.get_all_jobs()]
        assert len(known) <= 4
        assert known[-1] == "9"
        await analyzer.shutdown_async()

    asyncio.run(scenario())


def test_a_log_of_all_cycles_is_no_repeat(tmp_path):
    """What a job's cycles and the scheduler's log of all of them say is counted once each."""
    fault = STEP.format(7) + "[rank0]: Segmentation fault (core dumped)\n"

    async def scenario():
        analyzer = Analyzer(str(tmp_path), times=FAST)
        ended = {"job_id": "7", "analysis_intent": "terminal", "log_complete": True}
        used = []
        for name, fields in (("c0", {"cycle_id": 0}), ("all", {}), ("c1", {"cycle_id": 1})):
            log = tmp_path / f"{name}.log"
            log.write_text(fault)
            await analyzer.submit(str(log), **ended, **fields)
            found = await asyncio.wait_for(analyzer.analyze(str(log)), 30)
            used.append(found.attribution["retry"]["used"])
        await analyzer.shutdown_async()
        return used

    assert asyncio.run(scenario()) == [0, 0, 1]


def test_controller_takes_up_what_was_left(tmp_path):
    """A new controller answers for submissions that the last one had not finished."""
    log = tmp_path / "root" / "a.log"
    log.parent.mkdir()
    log.write_text(OOM)
    cfg = AttributionControllerConfig(
        str(log.parent),
        AttributionAnalysisConfig(times=FAST),
        AttributionCacheConfig(
            cache_file=str(tmp_path / "cache.json"), state_dir=str(tmp_path / "state")
        ),
    )

    async def left():
        controller = AttributionController(cfg)
        await controller.start()
        await controller.submit_log(str(log))
        await controller.shutdown_async()

    async def taken_up():
        controller = AttributionController(cfg)
        await controller.start()
        found = await controller.analyze_log(str(log))
        assert controller.status()["status"] == "ok"
        assert controller.get_cache()["keys"] == [str(log)]
        await controller.shutdown_async()
        return found.recommendation["action"]

    asyncio.run(left())
    assert asyncio.run(taken_up()) == "STOP"
    assert str(log) in json.loads((tmp_path / "cache.json").read_text())
    with pytest.raises(ConfigError, match="backend"):
        AttributionController(
            AttributionControllerConfig("/x", AttributionAnalysisConfig(backend="other"))
        )


def test_key_is_optional(monkeypatch, tmp_path):
    """A key comes from its variable or a file; without one only who demands it is refused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LLM_API_KEY", raising=False)
    monkeypatch.delenv("LLM_API_KEY_FILE", raising=False)
    assert api_keys.load_llm_api_key() == ""
    strict = AttributionCredentialsConfig(require_llm_api_key=True)
    with pytest.raises(ConfigError, match="LLM_API_KEY"):
        AttributionController(AttributionControllerConfig(str(tmp_path), credentials=strict))
    (tmp_path / ".llm_api_key").write_text("from-file\n")
    assert api_keys.load_llm_api_key() == "from-file"
    monkeypatch.setenv("LLM_API_KEY", "from-variable")
    assert api_keys.load_llm_api_key() == "from-variable"
    message = api_keys.llm_api_key_missing_message(context="here", suffix="!")
    assert message.startswith("here: no key")


class _Collector(http.server.BaseHTTPRequestHandler):
    received: list = []  # noqa: RUF012 - replaced per test
    failures = 0

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind = type(self)
        status = 200
        if kind.failures:
            kind.failures -= 1
            status = 500
        else:
            kind.received.append(json.loads(body))
            kind.arrived.set()
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_records_are_exported(tmp_path):
    """A collector that fails at first gets the record with the documented fields all the same."""
    kind = type(
        "Collector", (_Collector,), {"received": [], "failures": 1, "arrived": threading.Event()}
    )
    log = tmp_path / "a.log"
    log.write_text(OOM)
    hung = attribution_traces.make_job("host_stuck", 16, 1)
    attribution_traces.write(hung, tmp_path / "checkpoints")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/records"
        cfg = AttributionControllerConfig(
            str(tmp_path),
            AttributionAnalysisConfig(times=FAST),
            postprocessing=AttributionPostprocessingConfig(export_url=url, cluster_name="c"),
        )

        async def scenario():
            controller = AttributionController(cfg)
            await controller.submit_log(str(log), user="u", job_id="7")
            await controller.analyze_log(str(log))
            assert await asyncio.to_thread(kind.arrived.wait, 30)
            await controller.shutdown_async()

        asyncio.run(scenario())
        server.shutdown()
        thread.join()
    record = kind.received[0]
    assert (record["s_cluster"], record["s_user"], record["s_job_id"]) == ("c", "u", "7")
    assert (record["s_recommendation_action"], record["s_primary_issues"]) == ("STOP", "gpu.oom")
    assert record["s_fr_dump_path"] == str(tmp_path / "checkpoints")
    assert record["l_hanging_ranks"] == hung.guilty
    for wrong in ("ftp://x/", "http://x/?q=1", "nonsense"):
        with pytest.raises(ConfigError, match="export address"):
            AttributionController(
                AttributionControllerConfig(
                    "/x", postprocessing=AttributionPostprocessingConfig(export_url=wrong)
                )
            )


def test_results_that_cannot_be_kept_are_told(tmp_path, caplog):
    """A file of results that cannot be written at the end is a warning that says so."""
    cache = AttributionCacheConfig(cache_file=str(tmp_path / "none" / "cache.json"))
    AttributionController(AttributionControllerConfig(str(tmp_path), cache=cache)).shutdown()
    assert "the results are not kept" in caplog.text


def test_poster_never_waits():
    """A collector that hangs costs the caller nothing; what is too much is dropped."""
    release = threading.Event()

    def hang(_):
        release.wait(30)

    poster = ResultPoster(hang)
    accepted = sum(poster.post({}) for _ in range(400))
    assert 256 <= accepted <= 257
    release.set()
    poster.close()


def test_messages_hold_no_markup(tmp_path):
    """Text of a log cannot become markup in Markdown or Slack; only STOP is told in Slack."""
    log = tmp_path / "a.log"
    log.write_text("RuntimeError: <!channel> [x](http://evil) `rm`\n")
    record = build_dataflow_record([engine.analyze(log).to_item()], log_path="/<b>`x`")
    record["s_auto_resume_explanation"] = "<!channel> [x](http://evil) `rm`"
    slack = format_slack_text(record)
    assert "<" not in slack
    assert "`" not in slack
    assert "[x](" not in format_posting_markdown_body(record)
    assert [should_notify_slack(a) for a in ("STOP", "RESTART", None)] == [True, False, False]


def test_pipeline_of_log_and_traces(tmp_path):
    """The pipeline needs no runner; traces alone need dumps; the prose needs its function."""
    log = tmp_path / "a.log"
    log.write_text(OOM)
    mode = analysis_pipeline.AnalysisPipelineMode
    run = analysis_pipeline.run_attribution_pipeline
    found = asyncio.run(run(str(log)))
    assert found.log_result["recommendation"]["action"] == "STOP"
    assert found.fr_dump_path is None
    with pytest.raises(analysis_pipeline.FrDumpPathNotFoundError):
        asyncio.run(run(str(log), mode=mode.TRACE_ONLY))
    with pytest.raises(ValueError, match="run_log_fr_analyzer_mcp"):
        asyncio.run(run(str(log), mode=mode.LOG_AND_TRACE_WITH_LLM))


@pytest.mark.parametrize("given", [True, False], ids=["restart-count", "begun-again"])
@pytest.mark.parametrize("begins", ["continued", "truncated"])
def test_requeued_job_is_an_attempt_of_its_own(tmp_path, given, begins):
    """A requeued job has the same number and log: what it did before counts once, and only once."""
    log, state = tmp_path / "job_cycle0.log", str(tmp_path / "history.jsonl")
    fault = STEP.format(7) + "[rank0]: Segmentation fault (core dumped)\n"
    texts = [f"[rank1]: {OOM}", fault, fault, fault]

    async def scenario():
        found = []
        for attempt, text in enumerate(texts):
            # A new service each time, as a launcher that is requeued starts its own.
            analyzer = Analyzer(str(tmp_path), times=FAST, history=JobHistory(state))
            before = "" if begins == "truncated" or not attempt else log.read_text()
            log.write_text(before + text)
            fields = {"job_id": "7", "cycle_id": 0}
            if given and attempt:
                fields["attempt_index"] = attempt
            await analyzer.submit(str(log), **fields, analysis_intent="progressive")
            ended = {"analysis_intent": "terminal", "log_complete": True}
            await analyzer.submit(str(log), **fields, **ended)
            result = await asyncio.wait_for(analyzer.analyze(str(log)), 30)
            await analyzer.submit(str(log), **fields, **ended)  # said twice, one attempt
            found.append(result.attribution)
            await analyzer.shutdown_async()
        return found

    found = asyncio.run(scenario())
    assert [each["reason_code"] for each in found] == ["gpu.oom"] + 3 * ["host.segfault"]
    assert [each["retry"]["used"] for each in found] == [0, 0, 1, 2]
    assert [each["action"] for each in found][1:] == ["RESTART", "STOP", "STOP"]
    assert len(JobHistory(state).before("other", "7", 0, 0)) == len(texts)
    before = texts[0] + texts[1] if begins == "continued" else ""
    assert found[2]["first_fault"]["line"] == len(before.splitlines()) + 2


def test_attempt_that_was_cut_off_ends_when_the_next_begins(tmp_path):
    """A launcher that is killed says nothing: its attempt is evaluated when the next one begins."""
    log = tmp_path / "job_cycle0.log"

    async def scenario():
        history = JobHistory()
        analyzer = Analyzer(str(tmp_path), times=FAST, history=history)
        fields = {"job_id": "7", "cycle_id": 0}
        log.write_text(f"[rank1]: {OOM}")
        await analyzer.submit(str(log), **fields, analysis_intent="progressive")
        await analyzer.submit(str(log), **fields, analysis_intent="progressive", attempt_index=1)
        assert [each["attempt_index"] for each in history.before("other", "7", 0, 0)] == [0]
        fault = STEP.format(7) + "[rank0]: Segmentation fault (core dumped)\n"
        log.write_text(log.read_text() + fault)
        await analyzer.submit(str(log), **fields, analysis_intent="terminal", attempt_index=1)
        result = await asyncio.wait_for(analyzer.analyze(str(log)), 30)
        await analyzer.shutdown_async()
        return result.attribution["reason_code"]

    assert asyncio.run(scenario()) == "host.segfault"


def test_attempts_in_a_file_are_told_by_the_restart_count(tmp_path):
    """The same cycle of a requeued job is a further attempt of it, of one that was not the same."""
    log, history = tmp_path / "job.log", tmp_path / "history.jsonl"
    log.write_text(STEP.format(7) + "[rank0]: Segmentation fault (core dumped)\n")
    fields = {"history": history, "job_id": "7", "cycle_id": 0}
    used = [
        engine.analyze(log, **fields, attempt_index=attempt).retry.used for attempt in (0, 0, 1, 2)
    ]
    assert used == [0, 0, 1, 2]
