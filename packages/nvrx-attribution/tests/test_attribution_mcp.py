# SPDX-License-Identifier: Apache-2.0
"""The analyses as MCP tools: real servers on stdin and stdout, also with what no client sends."""

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys

import attribution_traces as simulated
import pytest
from attribution_model_server import answer, completion, serving

from nvidia_resiliency_ext.attribution._live.sessions import SessionTimes
from nvidia_resiliency_ext.attribution.analyzer import Analyzer
from nvidia_resiliency_ext.attribution.base import AttributionState, NVRxAttribution
from nvidia_resiliency_ext.attribution.mcp_integration import (
    AttributionModuleRegistry,
    MultiServerClient,
    NVRxMCPClient,
    create_args_from_dict,
    create_mcp_client,
    deserialize_result,
    get_server_command,
    global_registry,
    is_mcp_connection_error,
    register_all_modules,
    run_distributed_attribution,
    serialize_result,
    server,
    server_launcher,
)
from nvidia_resiliency_ext.attribution.mcp_integration.server import AttributionTools
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

pytest.importorskip("mcp")

pytestmark = pytest.mark.slow

OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory.\n"
STEP = "iteration {}/ 500 | consumed samples: 64 | lm loss: 2.1E+00 |\n"


def command(root, *more):
    """Return the command of a server below a directory."""
    return [*get_server_command(log_level="WARNING"), "--allowed-root", str(root), *more]


def test_registry_checks_and_orders():
    """Arguments are checked against the schema; modules come after those that they depend on."""
    registry = AttributionModuleRegistry()
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "n": {"type": "integer", "default": 3}},
        "required": ["path"],
    }
    registry.register("both", dict, "needs one", schema, {}, dependencies=["one"])
    registry.register("one", dict, "counts", schema, {}, requires_llm=True)
    assert registry.list_modules() == ["both", "one"]
    assert registry.get_module_metadata("one").requires_llm
    assert (
        registry.get_execution_order()
        == registry.get_execution_order(["both"])
        == [
            "one",
            "both",
        ]
    )
    assert registry.get_dependency_graph() == {"both": ["one"], "one": []}
    assert registry.to_mcp_tools()[1] == {
        "name": "one",
        "description": "counts",
        "inputSchema": schema,
    }
    assert registry.apply_defaults("one", {"path": "/x"}) == {"n": 3, "path": "/x"}
    assert registry.check_arguments("one", {"path": "/x", "n": None}) == {"path": "/x"}
    wrong = [{}, {"path": 1}, {"path": "x", "n": True}, {"path": "x", "other": 1}, ["path"]]
    for arguments in wrong:
        with pytest.raises(ValueError, match="one: "):
            registry.check_arguments("one", arguments)
    first, second = registry.get_instance("one"), registry.get_instance("one")
    assert first == second == {"n": 3}
    assert first is not second
    registry.register("one", dict, "counts", schema, {}, dependencies=["both"])
    with pytest.raises(ValueError, match="both -> one -> both"):
        registry.get_execution_order()
    assert registry.unregister("one")
    with pytest.raises(ValueError, match="no module 'one'"):
        registry.create_instance("one", {})


def test_results_are_kept_until_their_file_changes(tmp_path, monkeypatch):
    """A result is found by arguments, identifier and URI; not once its file is another."""
    log = tmp_path / "job.log"
    log.write_text("a")
    registry = AttributionModuleRegistry(4)
    result_id = registry.cache_result("m", {"b": 1, "a": 2}, {"x": 1}, [str(log)])
    assert result_id == registry.result_id_for_args("m", {"a": 2, "b": 1})
    assert registry.get_cached_result_by_args("m", {"a": 2, "b": 1}) == {"x": 1}
    assert registry.get_cached_result_by_uri(f"attribution://m/{result_id}") == {"x": 1}
    assert registry.get_cached_result_by_uri(f"attribution://other/{result_id}") is None
    log.write_text("more")
    assert registry.get_cached_result_by_id(result_id) is None
    for number in range(5):
        registry.cache_result("m", {"n": number}, number)
    assert [item[2] for item in registry.iter_results_cache_items()] == [2, 3, 4]
    registry.clear_cache("other")
    assert registry.count_results_cache_entries() == 3
    registry.clear_cache()
    assert registry.count_results_cache_entries() == 0
    monkeypatch.setenv("NVRX_MCP_RESULTS_CACHE_MAX_ENTRIES", "7")
    assert AttributionModuleRegistry().capacity == 7
    monkeypatch.setenv("NVRX_MCP_RESULTS_CACHE_MAX_ENTRIES", "many")
    with pytest.raises(ConfigError, match="MAX_ENTRIES='many'"):
        AttributionTools(str(tmp_path))


def test_results_survive_json():
    """What analyses return becomes JSON; a text that is none comes back as it is."""
    value = ("text", AttributionState.STOP, {3, 1})
    assert deserialize_result(serialize_result(value)) == ["text", "STOP", [1, 3]]
    assert deserialize_result("not json") == "not json"


def test_arguments_of_modules():
    """Arguments get the schema's defaults, as a mapping whose keys are attributes, too."""
    args = create_args_from_dict("log_fr_analyzer", {"log_path": "/x", "threshold": 2})
    assert (args["threshold"], args.merge_llm, args.pattern) == (2, False, "_dump_*")
    assert isinstance(args, dict)
    with pytest.raises(AttributeError, match="nothing"):
        _ = args.nothing
    with pytest.raises(ValueError, match="no module"):
        create_args_from_dict("other", {})
    register_all_modules()
    assert set(global_registry.list_modules()) >= {"log_analyzer", "fr_analyzer"}


def test_round_trip(tmp_path):
    """A client gets verdicts of logs, traces and both, and another one after a change."""
    log = tmp_path / "job.log"
    log.write_text(STEP.format(1) + OOM)
    job = simulated.make_job("host_stuck", 16, 1)
    dumps = str(simulated.write(job, tmp_path / "fr"))

    async def talk():
        async with create_mcp_client(allowed_root=str(tmp_path)) as client:
            tools = await client.list_tools()
            assert tools[-3:] == ["log_analyzer_progressive_start", "get_result", "status"]
            reply = await client.run_module("log_analyzer", log_path=str(log), is_per_cycle=True)
            assert reply["attribution"]["reason_code"] == "gpu.oom"
            assert reply["recommendation"] == {"action": "RESTART", "source": "log_analyzer"}
            assert reply["result"][0]["primary_issues"] == ["gpu.oom"]
            again = await client.run_module("log_analyzer", log_path=str(log), is_per_cycle=True)
            assert again == reply  # with the same time of analysis: it was kept
            assert await client.get_result(reply["result_id"]) == reply
            assert await client.list_resources() == [reply["resource_uri"]]
            assert await client.read_resource(reply["resource_uri"]) == reply
            log.write_text("ModuleNotFoundError: No module named 'model'\n")
            other = await client.run_module("log_analyzer", log_path=str(log), is_per_cycle=True)
            assert other["recommendation"]["action"] == "STOP"
            assert other["result_id"] == reply["result_id"]
            found = await client.run_module("fr_analyzer", fr_path=dumps)
            assert found["result"]["hanging_ranks"] == f"hanging ranks: {job.guilty}"
            assert found["report"]["kind"] == "host"
            both = await client.run_module("log_fr_analyzer", log_path=str(log), fr_path=dumps)
            assert both["attribution"]["fr"]["guilty_ranks"] == job.guilty
            assert both["recommendation"]["action"] == "STOP"
            status = await client.get_status()
            assert (status["status"], status["results"]) == ("ok", 3)
            assert await client.call_tool("status", {}) == status
            await client.reconnect()
            assert (await client.get_status())["results"] == 0

    asyncio.run(talk())


def test_growing_log(tmp_path):
    """A log of a running job has a verdict so far, which changes as the log grows."""
    log = tmp_path / "job_cycle0.log"
    log.write_text(STEP.format(1))

    async def talk():
        async with create_mcp_client(allowed_root=str(tmp_path)) as client:
            started = await client.run_module("log_analyzer_progressive_start", log_path=str(log))
            assert started["result"]["status"] == "started"
            before = await client.get_result(started["result_id"])
            assert before["status"] == "in_flight"
            with log.open("a") as file:
                file.write(OOM)
            after = await client.get_result(started["result_id"])
            assert before["recommendation"]["reason"].startswith("unknown")
            assert after["recommendation"]["reason"].startswith("gpu.oom")

    asyncio.run(talk())


def test_growing_log_that_rested_has_a_verdict(tmp_path):
    """A log that was let go because it did not grow any more is read again when it is asked for."""
    log = tmp_path / "hung.log"
    log.write_text(STEP.format(1) * (40_000_000 // len(STEP.format(1))) + OOM)
    os.utime(log, (1, 1))

    async def ask():
        tools = AttributionTools(str(tmp_path))
        times = SessionTimes(idle_s=0.05, growing_poll_s=0.01)
        tools._analyzer = Analyzer(str(tmp_path), times=times)
        started, _ = await tools.call("log_analyzer_progressive_start", {"log_path": str(log)})
        asked = {"result_id": started["result_id"]}
        (found,) = tools._analyzer._logs.values()
        await asyncio.wait([found.task])  # it is let go
        reply, _ = await tools.call("get_result", asked)
        assert found.session is None  # what it says is known
        await tools.close()
        return reply

    reply = asyncio.run(ask())
    assert reply["recommendation"]["reason"].startswith("gpu.oom")


def test_handles_of_growing_logs_are_bounded(tmp_path, monkeypatch):
    """The handle that was given longest ago gives way; the newest ones have their verdict."""
    monkeypatch.setattr(server, "_MOST_GROWING", 2)

    async def ask():
        tools = AttributionTools(str(tmp_path))
        handles = []
        for name in "abac":
            (tmp_path / f"{name}.log").write_text(OOM)
            arguments = {"log_path": str(tmp_path / f"{name}.log")}
            reply, _ = await tools.call("log_analyzer_progressive_start", arguments)
            handles.append(reply["result_id"])
        assert len(tools._growing) == 2
        are_errors = [(await tools.call("get_result", {"result_id": h}))[1] for h in handles]
        await tools.close()
        return are_errors

    assert asyncio.run(ask()) == [False, True, False, False]


def test_reply_whose_model_failed_is_not_kept(tmp_path, monkeypatch):
    """After a model failed the same call asks it again; only an answer of it is kept."""
    pytest.importorskip("httpx")
    log = tmp_path / "job.log"
    log.write_text(STEP.format(1) + OOM)
    job = simulated.make_job("host_stuck", 16, 1)
    paths = {"log_path": str(log), "fr_path": str(simulated.write(job, tmp_path / "fr"))}
    said = completion(answer("RESTART", "gpu.oom", "workload", 2))
    monkeypatch.setenv("NVRX_LLM_MODEL", "m")

    async def ask(name, arguments):
        tools = AttributionTools(str(tmp_path))
        for _ in range(3):
            reply, is_error = await tools.call(name, arguments)
            assert not is_error
        return reply

    with serving((401, b"{}"), said) as (url, requests):
        monkeypatch.setenv("NVRX_LLM_BASE_URL", url)
        reply = asyncio.run(ask("log_analyzer", {"log_path": str(log), "model": "m"}))
        assert (reply["attribution"]["refinement"]["used"], len(requests)) == (True, 2)
    with serving(said, (401, b"{}"), said) as (url, requests):
        monkeypatch.setenv("NVRX_LLM_BASE_URL", url)
        reply = asyncio.run(ask("log_fr_analyzer", {**paths, "merge_llm": True}))
        assert (bool(reply["llm_merged_summary"]), len(requests)) == (True, 4)


def test_nothing_outside_of_the_root_is_read(tmp_path):
    """Links, other places, patterns with a path and foreign addresses are refused, not followed."""
    root = tmp_path / "root"
    (root / "fr").mkdir(parents=True)
    outside = tmp_path / "secret.log"
    outside.write_text(OOM)
    (root / "link.log").symlink_to(outside)
    (root / "job.log").write_text(OOM)
    (tmp_path / "_dump_0").write_bytes(pickle.dumps({"entries": [], "version": "2.4"}))
    (root / "fr" / "_dump_0").symlink_to(tmp_path / "_dump_0")
    calls = [
        ("log_analyzer", {"log_path": str(outside)}, "outside"),
        ("log_analyzer", {"log_path": str(root / "link.log")}, "outside"),
        ("log_analyzer", {"log_path": "job.log"}, "not an absolute path"),
        ("log_analyzer", {"log_path": str(root)}, "not a regular file"),
        ("log_analyzer", {"log_path": str(root / "none.log")}, "not found"),
        ("log_analyzer", {"log_path": str(root / "job.log") + "\0"}, "not an absolute path"),
        ("fr_analyzer", {"fr_path": str(tmp_path)}, "outside"),
        ("fr_analyzer", {"fr_path": str(root / "fr")}, "outside"),
        ("fr_analyzer", {"fr_path": str(root), "pattern": "../*"}, "has a path"),
        ("log_fr_analyzer", {}, "input_data"),
        ("log_analyzer_progressive_start", {"log_path": str(outside)}, "outside"),
        ("log_analyzer", {"log_path": str(root / "job.log"), "model": "m"}, "NVRX_LLM_BASE_URL"),
        ("get_result", {"result_id": "0" * 64}, "no result"),
        ("status", {"x": 1}, "no argument 'x'"),
        ("\x1b[31mother", {}, "no module"),
    ]

    async def ask():
        tools = AttributionTools(str(root))
        for name, arguments, expected in calls:
            reply, is_error = await tools.call(name, arguments)
            assert is_error
            assert (reply["result"], reply["recommendation"]["action"]) == ([], "UNKNOWN")
            assert expected in reply["error"], reply
            assert "\x1b" not in json.dumps(reply)
        await tools.close()

    asyncio.run(ask())


def test_limits_of_a_call(tmp_path):
    """A call over time or one that fails is answered as such; a long reply is cut."""

    class Slow(NVRxAttribution):
        def __init__(self, _):
            super().__init__(self.wait, lambda x: x, lambda x: (x, AttributionState.CONTINUE))

        async def wait(self, args):
            if args.get("fails"):
                raise KeyError("inside")
            await asyncio.sleep(0 if args.get("long") else 600)
            return ["x" * 1000] * 20_000

    async def ask():
        registry = AttributionModuleRegistry()
        properties = {"fails": {"type": "boolean"}, "long": {"type": "boolean"}}
        registry.register("slow", Slow, "waits", {"properties": properties}, {})
        tools = AttributionTools(str(tmp_path), None, 0.2, registry)
        reply, is_error = await tools.call("slow", {})
        assert (is_error, reply["error"]) == (True, "not done within 0.2 s")
        reply, is_error = await tools.call("slow", {"fails": True})
        assert (is_error, reply["error"]) == (True, "internal error: KeyError")
        tools = AttributionTools(str(tmp_path), None, 60, registry)
        reply, is_error = await tools.call("slow", {"long": True})
        assert not is_error
        assert 0 < len(json.dumps(reply)) <= 1 << 20

    asyncio.run(ask())


def test_garbage_is_answered_or_ignored(tmp_path):
    """No bytes on stdin end the server or make it keep them; it ends with stdin."""
    (tmp_path / "job.log").write_text(OOM)
    hello = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-03-26",
            "capabilities": {},
            "clientInfo": {"name": "t", "version": "0"},
        },
    }
    garbage = [
        b"\n",
        b"{",
        b"\x00\xff\xfe" * 1000,
        b"[1, 2]",
        b"null",
        b'{"jsonrpc": "2.0", "id": 7, "method": "no/such"}',
        b'{"jsonrpc": "2.0", "id": {}, "method": 3}',
        b'{"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": {"name": 5}}',
        b"[" * 100_000,
        b"x" * (9 << 20),
    ]
    call = {
        "jsonrpc": "2.0",
        "id": 2,
        "method": "tools/call",
        "params": {"name": "log_analyzer", "arguments": {"log_path": str(tmp_path / "job.log")}},
    }
    started = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    with subprocess.Popen(
        command(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            for message in (hello, started):
                server.stdin.write(json.dumps(message).encode() + b"\n")
            server.stdin.flush()
            assert json.loads(server.stdout.readline())["id"] == 1
            for data in garbage:
                server.stdin.write(data + b"\n")
            server.stdin.write(json.dumps(call).encode() + b"\n")
            server.stdin.flush()
            replies = iter(lambda: json.loads(server.stdout.readline()), None)
            answer = next(reply for reply in replies if reply.get("id") == 2)
            verdict = json.loads(answer["result"]["content"][0]["text"])
            assert verdict["recommendation"]["action"] == "STOP"
            server.stdin.close()
            assert server.wait(60) == 0
        finally:
            server.kill()


def test_lost_server_is_started_anew(tmp_path):
    """After the server was killed one call fails as such; a resilient one gets its answer."""
    log = tmp_path / "job.log"
    log.write_text(OOM)

    def kill(client):
        found = subprocess.run(
            ["pgrep", "-P", str(os.getpid()), "-f", str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
        )
        os.kill(int(found.stdout.split()[0]), signal.SIGKILL)

    async def talk():
        async with create_mcp_client(allowed_root=str(tmp_path)) as client:
            await client.get_status()
            kill(client)
            with pytest.raises(Exception, match=r"(?i)closed") as failed:
                await client.get_status()
            assert is_mcp_connection_error(failed.value)
            reply = await client.run_module_resilient("log_analyzer", log_path=str(log))
            assert reply["recommendation"]["action"] == "STOP"

    asyncio.run(talk())
    assert not is_mcp_connection_error(ValueError("closed"))


def test_each_request_has_a_deadline():
    """A server that answers the handshake and nothing else is given up, whatever it is asked."""
    mute = """
import json, sys
hello = json.loads(sys.stdin.readline())
about = {"protocolVersion": hello["params"]["protocolVersion"], "capabilities": {}}
about["serverInfo"] = {"name": "m", "version": "0"}
print(json.dumps({"jsonrpc": "2.0", "id": hello["id"], "result": about}), flush=True)
sys.stdin.read()
"""

    async def talk():
        async with NVRxMCPClient([sys.executable, "-IS", "-c", mute], call_timeout_s=5.0) as client:
            asked = (
                *(client.list_tools(), client.list_resources()),
                *(client.read_resource("attribution://m/1"), client.get_status()),
            )
            found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
        assert [type(error).__name__ for error in found] == ["MCPError"] * 4

    asyncio.run(talk())


def test_several_servers(tmp_path):
    """Each server answers for its own directory; the reply of one does not depend on others."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.log").write_text(OOM)
    commands = {name: command(tmp_path / name, "--modules", "log_analyzer") for name in "ab"}

    async def talk():
        arguments = {
            "a": {"log_path": str(tmp_path / "a" / "job.log")},
            "b": {"log_path": str(tmp_path / "a" / "job.log")},
        }
        found = await run_distributed_attribution(commands, "log_analyzer", arguments)
        assert found["a"]["recommendation"]["action"] == "STOP"
        assert "outside" in found["b"]["error"]
        async with MultiServerClient({"a": commands["a"]}) as clients:
            assert (await clients.list_tools())["a"][0] == "log_analyzer"
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the transport says
            async with MultiServerClient({"a": [sys.executable, "-c", "pass"]}):
                pass

    asyncio.run(talk())


def test_program_refuses_wrong_arguments(tmp_path, monkeypatch, capsys):
    """Without a root, with a wrong one or an unknown module, there is one line and exit code 2."""
    monkeypatch.delenv("NVRX_ATTRSVC_ALLOWED_ROOT", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for arguments in (
        [],
        ["--allowed-root", "logs"],
        ["--allowed-root", str(tmp_path / "none")],
        ["--allowed-root", str(tmp_path), "--modules", "other"],
    ):
        assert server_launcher.main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
