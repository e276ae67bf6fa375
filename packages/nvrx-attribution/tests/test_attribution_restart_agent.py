# SPDX-License-Identifier: Apache-2.0
"""Restart decisions as requests and responses in JSON."""

import asyncio
import json

import pytest
from attribution_model_server import answer, completion, serving

from nvidia_resiliency_ext.attribution.controller import (
    AttributionController,
    AttributionControllerConfig,
)
from nvidia_resiliency_ext.attribution.restart_agent import (
    RestartAgentRequest,
    RestartAgentRuntime,
    build_restart_agent_runtime,
    cli,
    config_fingerprint,
    load_restart_agent_config,
    parse_restart_agent_config,
)
from nvidia_resiliency_ext.services.attrsvc.settings import Settings
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

SCHEMA = {"schema_version": "restart_agent_config.v1"}
STEP = "iteration {}/ 500 | consumed samples: 64 | lm loss: 2.1E+00 |\n"
EXCEPTION = "[rank0]: acme.PlanError: the plan has no stage for rank 0\n"
NAN = "[rank0]: RuntimeError: found NaN in local grad norm\n"
KEYS = {
    *("schema_version", "decision", "decision_basis", "retry_policy", "failure_domain"),
    *("result_provenance", "primary_failure", "root_cause_assessment", "secondary_failures"),
    *("model_recovery_assessment", "cascades", "evidence_coverage", "evidence", "justification"),
}


@pytest.fixture(autouse=True)
def no_model_of_the_site(monkeypatch, tmp_path):
    """Keep the endpoint and key of whoever runs the tests out of them."""
    for name in ("NVRX_LLM_BASE_URL", "NVRX_ATTRSVC_LLM_BASE_URL", "LLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def parsed(**changes):
    """Return the configuration with some sections."""
    return parse_restart_agent_config({**SCHEMA, **changes}, {})


def test_requests():
    """A request survives JSON; unknown keys and wrong values are refused by name."""
    request = RestartAgentRequest("/logs/a.log", "7", 2, "progressive_end")
    assert RestartAgentRequest.from_payload(json.loads(json.dumps(request.to_payload()))) == request
    good = request.to_payload()
    for change, text in (
        ({"log_path": "a.log"}, "log_path"),
        ({"cycle_id": "2"}, "cycle_id"),
        ({"cycle_id": True}, "cycle_id"),
        ({"job_id": 7}, "job_id"),
        ({"analysis_mode": "later"}, "analysis_mode"),
        ({"more": 1}, "unknown key 'more'"),
        ({"schema_version": "v0"}, "schema_version"),
    ):
        with pytest.raises(ConfigError, match=text):
            RestartAgentRequest.from_payload({**good, **change})
    for wrong in (None, [], {"schema_version": "restart_agent_request.v1"}):
        with pytest.raises(ConfigError):
            RestartAgentRequest.from_payload(wrong)


def test_configuration(tmp_path):
    """Defaults are those of the schema; what is unknown, wrong or too large is refused."""
    config = parse_restart_agent_config(SCHEMA, environ={})
    assert config == parsed()
    assert config.settings["routing"] == {
        "mode": "collect_all",
        "max_parallel_models": 4,
        "timeout_seconds": 240.0,
    }
    assert (config.policy.general_ceiling, config.policy.managed_retries) == (3, None)
    assert config.routes == {}
    site = {"NVRX_LLM_BASE_URL": "http://h/v1", "NVRX_LLM_MODEL": "m", "NVRX_LLM_TOP_P": "0.5"}
    usual = {"routing": {"timeout_seconds": 9}, "model_defaults": {"temperature": 0}}
    (route,) = parse_restart_agent_config({**SCHEMA, **usual}, site).routes.values()
    assert (route.model, route.temperature, route.top_p, route.deadline_s) == ("m", 0, 0.5, 9)
    for site, own in (
        ({"NVRX_LLM_BASE_URL": "http://h/v1"}, {"model": "m"}),
        ({"NVRX_LLM_MODEL": "m"}, {"base_url": "http://h/v1"}),
    ):
        for given in ({"model_defaults": own}, {"model_routes": [own]}):
            (route,) = parse_restart_agent_config({**SCHEMA, **given}, site).routes.values()
            assert (route.model, route.base_url) == ("m", "http://h/v1")
    with pytest.raises(ConfigError, match="lacks model"):
        parse_restart_agent_config(SCHEMA, {"NVRX_LLM_BASE_URL": "http://h/v1"})
    skip = {"id": "bad_token_retry_then_skip", "allowed_retries": 2}
    assert parsed(declared_recovery_capabilities=[skip]).policy.managed_retries == 2
    for change, text in (
        ({"routing": {"mode": "first"}}, "routing.mode"),
        ({"routing": {"speed": 1}}, "unknown key 'speed'"),
        ({"runtime": {"l2": {}}}, "unknown key 'l2'"),
        ({"runtime": {"l0_source": {"chunk_size_bytes": "big"}}}, "chunk_size_bytes"),
        ({"retry_policy": {"general_retry_allowed_retries": True}}, "general_retry"),
        ({"enrichment": {"enabled": None}}, "enrichment.enabled"),
        ({"declared_recovery_capabilities": [{"id": "other"}]}, "must be 'bad_token"),
        ({"declared_recovery_capabilities": [{**skip, "allowed_retries": 9}]}, "at most 3"),
        ({"model_routes": [{"id": "a", "model": "m"}]}, "lacks model or base_url"),
        ({"model_routes": [{"model": "m", "base_url": "ftp://x"}]}, "ftp"),
        ({"speed": 1}, "unknown key 'speed'"),
    ):
        with pytest.raises(ConfigError, match=text):
            parsed(**change)
    path = tmp_path / "agent.json"
    path.write_text(json.dumps({**SCHEMA, "config_id": "site"}))
    assert load_restart_agent_config(path).config_id == "site"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"agent\.json"):
        load_restart_agent_config(path)


def test_fingerprint_is_of_what_has_an_effect():
    """Names and addresses change no fingerprint; settings and models do."""
    route = {"id": "a", "model": "m", "base_url": "http://one/v1"}
    same = [
        parsed(model_routes=[route]),
        parsed(model_routes=[{**route, "id": "b", "base_url": "http://two/v1"}], config_id="x"),
    ]
    assert len({config_fingerprint(config) for config in same}) == 1
    other = parsed(model_routes=[{**route, "model": "n"}])
    assert config_fingerprint(other) != config_fingerprint(same[0])
    assert config_fingerprint(parsed()).startswith("sha256:")


def test_history_ends_in_stop(tmp_path):
    """The same fault without progress is restarted as often as allowed, and then not."""
    log = tmp_path / "job.log"
    log.write_text(STEP.format(1) + EXCEPTION)
    with build_restart_agent_runtime(parsed()) as agent:
        assert isinstance(agent, RestartAgentRuntime)
        found = [agent.analyze(RestartAgentRequest(str(log), "j", cycle)) for cycle in range(4)]
        assert all(set(response) == KEYS for response in found)
        assert [response["decision"] for response in found][:2] == ["RESTART", "RESTART"]
        assert found[-1]["decision_basis"] == "retry_budget_exhausted"
        records = agent.attempt_record_control.records()
        assert [record["cycle_id"] for record in records] == [0, 1, 2, 3]
    with build_restart_agent_runtime(parsed()) as agent:
        agent.attempt_record_control.seed(json.loads(json.dumps(records)))
        again = agent.analyze(RestartAgentRequest(str(log), "j", 4))
        assert again["decision"] == "STOP"
        agent.attempt_record_control.clear()
        assert agent.analyze(RestartAgentRequest(str(log), "j", 5))["decision"] == "RESTART"
        with pytest.raises(ConfigError, match="attempt record"):
            agent.attempt_record_control.seed([{"job_id": "j"}])
    off = parsed(runtime={"history": {"enabled": False}})
    with build_restart_agent_runtime(off) as agent:
        for cycle in range(5):
            response = agent.analyze(RestartAgentRequest(str(log), "j", cycle))
        assert response["decision"] == "RESTART"


@pytest.mark.parametrize(
    ("per_job", "total", "kept"),
    [(2, 3, [("j", 2), ("k", 0), ("k", 1)]), (0, 3, []), (2, 0, [])],
)
def test_attempts_are_limited(tmp_path, per_job, total, kept):
    """The oldest attempts of a job and of all are dropped; a limit of 0 keeps none."""
    log = tmp_path / "job.log"
    log.write_text(EXCEPTION)
    limits = {"max_attempts_per_job": per_job, "max_total_records": total}
    with build_restart_agent_runtime(parsed(runtime={"history": limits})) as agent:
        for job, cycle in (("j", 0), ("j", 1), ("j", 2), ("k", 0), ("k", 1)):
            agent.analyze(RestartAgentRequest(str(log), job, cycle))
        records = agent.attempt_record_control.records()
    assert [(record["job_id"], record["cycle_id"]) for record in records] == kept


def test_declared_recovery(tmp_path):
    """A workload that skips bad data by itself gets the retries that it declares."""
    log = tmp_path / "job.log"
    log.write_text(STEP.format(1) + NAN)
    skip = {"id": "bad_token_retry_then_skip", "allowed_retries": 2}
    decisions = {}
    for name, given in (("with", [skip]), ("without", [])):
        retries = {"general_retry_allowed_retries": 4}
        config = parsed(declared_recovery_capabilities=given, retry_policy=retries)
        with build_restart_agent_runtime(config) as agent:
            found = [
                agent.analyze(
                    RestartAgentRequest(str(log), "j", cycle), retain_detailed_artifacts=True
                )
                for cycle in range(3)
            ]
            assert found[0]["retry_policy"]["general_root_ceiling"] == 4
            scope = found[0]["attribution"]["retry"]["scope"]
            assert scope == ("root_and_entity" if given else "root")
            decisions[name] = [response["decision_basis"] for response in found]
    assert decisions["with"][:2] == ["workload_managed_recovery_available"] * 2
    assert decisions["without"] == ["general_retry_available", *["retry_budget_exhausted"] * 2]


def test_no_retry_at_all(tmp_path):
    """Where a file allows no retry, the first failure ends the job."""
    log = tmp_path / "job.log"
    skip = {"id": "bad_token_retry_then_skip", "allowed_retries": 0}
    bounded = {"retry_policy": {"bounded_retry_allowed_retries": 0}}
    segfault = "[rank0]: Fatal Python error: Segmentation fault\n"
    for given, text in ((bounded, segfault), ({"declared_recovery_capabilities": [skip]}, NAN)):
        log.write_text(STEP.format(1) + text)
        with build_restart_agent_runtime(parsed(**given)) as agent:
            found = agent.analyze(RestartAgentRequest(str(log), "j", 0))
        assert (found["decision"], found["decision_basis"]) == ("STOP", "retry_budget_exhausted")


def test_growing_log(tmp_path):
    """A log is read from start to end of the job in parts, and evaluated at both times."""
    log = tmp_path / "job.log"
    log.write_text(STEP.format(1))
    source = {"l0_source": {"read_mode": "single_snapshot"}}
    with build_restart_agent_runtime(parsed(runtime=source)) as agent:
        start = RestartAgentRequest(str(log), "j", 0, "progressive_start")
        end = RestartAgentRequest(str(log), "j", 0, "progressive_end")
        assert agent.analyze(start)["primary_failure"] is None
        with log.open("a") as file:
            file.write(EXCEPTION)
        assert agent.analyze(start)["primary_failure"]["line"] == 2
        assert agent.attempt_record_control.records() == []
        assert agent.analyze(end)["primary_failure"]["line"] == 2
        assert len(agent.attempt_record_control.records()) == 1
        with pytest.raises(ConfigError, match="progressive_start"):
            agent.analyze(end)
        missing = agent.analyze(RestartAgentRequest(str(tmp_path / "none.log")))
        assert missing["decision_basis"] == "log_unavailable"
        assert missing["result_provenance"]["nvrx_use"] == "fallback_to_nvrx_default"


def test_log_that_comes_after_the_start(tmp_path):
    """A log that was not there when its job started is read when the job has ended."""
    log = tmp_path / "job.log"
    with build_restart_agent_runtime(parsed()) as agent:
        found = agent.analyze(RestartAgentRequest(str(log), "j", 0, "progressive_start"))
        assert found["decision_basis"] == "log_unavailable"
        log.write_text(STEP.format(1) + EXCEPTION)
        found = agent.analyze(RestartAgentRequest(str(log), "j", 0, "progressive_end"))
        assert found["primary_failure"]["line"] == 2
        with pytest.raises(ConfigError, match="progressive_start"):
            agent.analyze(RestartAgentRequest(str(log), "j", 0, "progressive_end"))


def test_models_are_asked_after_the_rules(tmp_path):
    """All routes are asked; the first with an answer counts, and the rules are out before."""
    pytest.importorskip("httpx")
    log = tmp_path / "job.log"
    log.write_text(EXCEPTION)
    told = []
    reply = completion(answer("STOP", "user.config_error", "workload", 1))
    with serving((500, b"")) as (bad, _), serving(reply) as (good, _):
        routes = [
            {"id": "bad", "model": "m", "base_url": bad},
            {"id": "good", "model": "m", "base_url": good},
        ]
        config = parsed(model_routes=routes, routing={"max_parallel_models": 1})
        with build_restart_agent_runtime(config) as agent:
            response = agent.analyze(
                RestartAgentRequest(str(log), "j", 0),
                on_deterministic_ready=lambda found: told.append(found["decision"]),
                on_route_complete=lambda name, found: told.append((name, found["used"])),
                retain_detailed_artifacts=True,
            )
            records = agent.attempt_record_control.records()
    assert told == ["RESTART", ("bad", False), ("good", True)]
    assert response["decision"] == "STOP"
    assert response["result_provenance"]["candidate_kind"] == "l1_enriched"
    assert response["attribution"]["refinement"]["used"]
    assert records[0]["enriched"]["failure_class"] == "user.config_error"
    assert records[0]["deterministic"]["failure_class"] == "user.exception"


def test_program(tmp_path, capsys):
    """The program writes response, trace and attempts; wrong files are one line."""
    log = tmp_path / "job.log"
    log.write_text(STEP.format(1) + EXCEPTION)
    files = {name: str(tmp_path / f"{name}.json") for name in ("records", "result", "trace")}
    arguments = [str(log), "--job-id", "j", "--disable-l1"]
    out = ["--attempt-records-json-out", files["records"], "--result-json", files["result"]]
    assert cli.main([*arguments, *out, "--cycle-id", "0", "--trace-json", files["trace"]]) == 0
    assert capsys.readouterr().out == ""
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["response"] == json.loads((tmp_path / "result.json").read_text())
    assert trace["deterministic"]["decision"] == "RESTART"
    for cycle in range(1, 4):
        records = ["--attempt-records-json-in", files["records"], *out[:2], "--summary"]
        assert cli.main([*arguments, *records, "--cycle-id", str(cycle)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("STOP (retry_budget_exhausted)")
    (tmp_path / "records.json").write_text("{}")
    for wrong in (["--attempt-records-json-in", files["records"]], ["--config", str(log)]):
        assert cli.main([str(log), *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_service_takes_the_retries_of_a_file(tmp_path, monkeypatch):
    """The service allows as many retries as the file says; a wrong file is named."""
    path = tmp_path / "agent.json"
    retries = {"general_retry_allowed_retries": 1}
    path.write_text(json.dumps({**SCHEMA, "retry_policy": retries}))
    monkeypatch.setenv("NVRX_ATTRSVC_RESTART_AGENT_CONFIG", str(path))

    async def scenario():
        controller = AttributionController(AttributionControllerConfig(str(tmp_path)))
        actions = []
        for cycle in range(2):
            log = tmp_path / f"job_cycle{cycle}.log"
            log.write_text(STEP.format(1) + "[rank0]: TCPStore recvValue failed on socket\n")
            await controller.submit_log(str(log), analysis_intent="terminal", log_complete=True)
            found = await controller.analyze_log(str(log))
            actions.append((found.recommendation["action"], found.attribution["retry"]["budget"]))
        await controller.shutdown_async()
        return actions

    actions = asyncio.run(scenario())
    assert actions[0][0] == "RESTART"
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"agent\.json"):
        AttributionController(AttributionControllerConfig(str(tmp_path)))
    assert actions[1][0] == "STOP"


def test_service_asks_no_model_of_a_file_when_that_is_switched_off(tmp_path, monkeypatch):
    """The variable for a model's refinement counts for the models of a file, too."""
    pytest.importorskip("httpx")
    path, log = tmp_path / "agent.json", tmp_path / "job.log"
    log.write_text(EXCEPTION)
    switch = "NVRX_ATTRSVC_RESTART_AGENT_ENRICHMENT_ENABLED"
    environ = {"NVRX_ATTRSVC_ALLOWED_ROOT": str(tmp_path)}
    environ["NVRX_ATTRSVC_RESTART_AGENT_CONFIG"] = str(path)

    async def asked(config, requests, count):
        controller = AttributionController(config)
        await controller.submit_log(str(log), analysis_intent="terminal", log_complete=True)
        await controller.analyze_log(str(log))
        for _ in range(3000 if count else 20):  # one that is to come is waited for
            await asyncio.sleep(0.02)
            if requests:
                break
        await controller.shutdown_async()
        return len(requests)

    with serving(completion(answer("STOP", "user.config_error", "workload", 1))) as (url, requests):
        route = {"id": "a", "model": "m", "base_url": url}
        path.write_text(json.dumps({**SCHEMA, "model_routes": [route]}))
        for value, count in (("0", 0), ("1", 1)):
            monkeypatch.setenv(switch, value)
            settings = Settings.from_environ({**environ, switch: value})
            assert asyncio.run(asked(settings.controller_config(), requests, count)) == count
    with pytest.raises(ConfigError, match=switch):
        Settings.from_environ({**environ, switch: "perhaps"})


def test_service_needs_a_key_for_the_address_of_its_environment(tmp_path, monkeypatch):
    """A file without models changes nothing about when a service asks the site's own."""
    path = tmp_path / "agent.json"
    environ = {"NVRX_ATTRSVC_ALLOWED_ROOT": "/l", "NVRX_ATTRSVC_RESTART_AGENT_CONFIG": str(path)}
    site = {"NVRX_LLM_BASE_URL": "http://h/v1", "NVRX_LLM_MODEL": "m"}
    switch = {"NVRX_ATTRSVC_RESTART_AGENT_ENRICHMENT_ENABLED": "1"}
    for name, value in site.items():
        monkeypatch.setenv(name, value)
    path.write_text(json.dumps(SCHEMA))
    assert Settings.from_environ({**environ, **site}).model is None
    assert Settings.from_environ({**environ, **site, **switch}).model.model == "m"
    monkeypatch.setenv("LLM_API_KEY", "k")
    assert Settings.from_environ({**environ, **site}).model.model == "m"
    monkeypatch.delenv("LLM_API_KEY")
    route = {"model": "own", "base_url": "http://own/v1"}
    path.write_text(json.dumps({**SCHEMA, "model_routes": [route]}))
    assert Settings.from_environ({**environ, **site}).model.model == "own"
