# SPDX-License-Identifier: Apache-2.0
"""Attribution in the launcher: settings, the managed service, and a service that misbehaves."""

import argparse
import json
import queue
import sys
import time
from pathlib import Path

import ports
import pytest
from attribution_service import LIMIT_S, NOBODY, attribution_service

from nvidia_resiliency_ext.fault_tolerance._config import attribution as endpoint
from nvidia_resiliency_ext.fault_tolerance._hosting import attribution
from nvidia_resiliency_ext.fault_tolerance._hosting.attribution import AttributionWatch
from nvidia_resiliency_ext.fault_tolerance._plan.plan import plan_from_args
from nvidia_resiliency_ext.fault_tolerance.attribution_manager import (
    ATTRIBUTION_STOP_ACTIONS,
    DEFAULT_ATTRIBUTION_PORT,
    DEFAULT_ATTRIBUTION_STARTUP_TIMEOUT,
    AttributionConfig,
    AttributionEndpoint,
    AttributionManager,
)
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
from nvidia_resiliency_ext.shared_utils import attribution_client
from nvidia_resiliency_ext.shared_utils.clock import SystemClock
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.event_loop import EventLoop


def plan(*words):
    """Return the plan of a command line that runs /bin/true."""
    return plan_from_args(parse_args([*words, "--no-python", "/bin/true"]), {"PATH": "/bin"})


# --- settings ------------------------------------------------------------------------------------


def test_the_documented_constants():
    """Names and values that programs import."""
    assert DEFAULT_ATTRIBUTION_PORT == 50050
    assert DEFAULT_ATTRIBUTION_STARTUP_TIMEOUT == 20.0
    assert ATTRIBUTION_STOP_ACTIONS == ("log", "no-restart")


def test_nothing_asked_for_is_off():
    """Without an endpoint there is no service, no port and no thread."""
    config = AttributionConfig()
    assert (config.is_enabled, config.is_managed, config.client_endpoint) == (False, False, None)
    assert AttributionManager(config, is_store_host=True).start_if_needed() is None


def test_what_a_parsed_command_line_says_wins_over_the_configuration():
    """Programs hand in their own arguments and a configuration that was not merged with them."""
    args = argparse.Namespace(
        ft_attribution_endpoint="localhost",
        ft_attribution_stop_action="no-restart",
        ft_attribution_export_url="http://x/results",
    )
    config = AttributionConfig.from_args(args, "/logs/job.log", FaultToleranceConfig())
    assert (config.endpoint, config.enforce_stop) == ("localhost", True)
    assert config.export_url == "http://x/results"
    merged = FaultToleranceConfig(attribution_endpoint="http://h:1")
    args.ft_attribution_endpoint = args.ft_attribution_export_url = None
    assert AttributionConfig.from_args(args, "/l", merged).endpoint == "http://h:1"
    args.ft_attribution_endpoint = "none"
    assert not AttributionConfig.from_args(args, "/l", merged).is_enabled


def test_localhost_is_run_by_the_store_host():
    """The managed service listens on the loopback; other launchers ask nobody."""
    config = AttributionConfig("localhost", stop_action="no-restart")
    assert config.is_managed
    assert config.client_endpoint == AttributionEndpoint("http://127.0.0.1:50050", True)
    assert config.client_endpoint.endpoint == "http://127.0.0.1:50050"
    assert AttributionManager(config, is_store_host=False).start_if_needed() is None


@pytest.mark.parametrize(
    "endpoint", ["http://h:80", "https://h.example:8443/base", "http://[fd00::1]:80", "unix:///a/b"]
)
def test_services_of_somebody_else_are_asked_where_they_are(endpoint):
    """An external endpoint is used as it stands, with the rule about STOP."""
    config = AttributionConfig(endpoint, stop_action="no-restart")
    manager = AttributionManager(config, is_store_host=True)
    assert manager.start_if_needed() == AttributionEndpoint(endpoint, enforce_stop=True)
    manager.stop()


@pytest.mark.parametrize(
    ("endpoint", "problem"),
    [
        ("myhost", "is not localhost"),
        ("127.0.0.1:50050", "is not localhost"),
        ("http://0.0.0.0:1", "listens everywhere"),
        ("http://[::]:1", "listens everywhere"),
        ("http://h", "the port is missing"),
        ("http://h:99999", "Port out of range"),
        ("ftp://h:1", "is not localhost"),
        ("http://:1", "is no host"),
        ("http://u:p@h:1", "only scheme"),
        ("http://h:1/?a=b", "only scheme"),
        ("unix://h/a", "unix:///PATH"),
        ("unix:///", "unix:///PATH"),
    ],
)
def test_what_is_no_address_of_a_service_is_refused(endpoint, problem):
    """Each mistake is named with the flag."""
    with pytest.raises(ValueError, match=problem):
        AttributionConfig(endpoint)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"stop_action": "panic"}, "is not one of log, no-restart"),
        ({"export_url": "http://x/"}, "needs --ft-attribution-endpoint localhost"),
        ({"endpoint": "http://h:1", "export_url": "http://x/"}, "endpoint localhost"),
        ({"endpoint": "localhost", "export_url": "ftp://x/"}, "no http or https"),
        ({"endpoint": "localhost", "export_url": "http://x/?q"}, None),
        ({"endpoint": "localhost", "export_url": "http://x/?q=1"}, "a query"),
        ({"endpoint": "localhost", "export_url": "http://x/#f"}, "a fragment"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields, problem):
    """Stop actions and export addresses are checked before anything starts."""
    if problem is None:
        fields["export_url"] = "https://x/path"
        assert AttributionConfig(**fields).export_url == "https://x/path"
        return
    with pytest.raises(ValueError, match=problem):
        AttributionConfig(**fields)


def test_flags_make_the_settings():
    """Every flag of attribution reaches its place; logs go beside the launchers' own."""
    made = plan(
        "--ft-per-cycle-applog-prefix=/logs/job.log",
        "--ft-attribution-endpoint=localhost",
        "--ft-attribution-startup-timeout=3",
        "--ft-attribution-llm-api-key-file=/k",
        "--ft-attribution-llm-base-url=http://m",
        "--ft-attribution-llm-model=m",
        "--ft-attribution-analysis-backend=lib",
        "--ft-attribution-stop-action=no-restart",
        "--ft-attribution-log-level=DEBUG",
        "--ft-attribution-export-url=http://e/x",
    ).attribution
    assert made == AttributionConfig(
        "localhost", "/logs", "/logs/nvrx/job_attribution.log", 3.0, "/k", "http://m", "m", "lib",
        "no-restart", "DEBUG", "http://e/x",
    )  # fmt: skip
    made = plan(
        "--ft-per-cycle-applog-prefix=/logs/job.log",
        "--ft-nvrx-logfile=/logs/nvrx.log",
        "--ft-attribution-endpoint=localhost",
    ).attribution
    assert made.log_file == "/logs/nvrx_attribution.log"


def test_host_and_port_of_earlier_releases_are_an_endpoint():
    """`--ft-attrsvc-host` and `--ft-attrsvc-port` name an external service."""
    made = plan(
        "--ft-per-cycle-applog-prefix=/logs/job.log", "--ft-attrsvc-host=h", "--ft-attrsvc-port=80"
    )
    assert made.attribution.endpoint == "http://h:80"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--ft-attribution-endpoint=localhost"], "needs --ft-per-cycle-applog-prefix"),
        (
            ["--ft-per-cycle-applog-prefix=/a.log", "--ft-attribution-endpoint=h"],
            "is not localhost",
        ),
        (
            [
                "--ft-per-cycle-applog-prefix=/a.log",
                "--ft-attribution-endpoint=localhost",
                "--ft-enable-log-server=1",
                "--ft-log-server-port=50049",
                "--ft-log-aggregator-count=2",
            ],
            "listens on 50050",
        ),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(words, problem):
    """Missing logs, bad endpoints and ports that collide are usage errors."""
    with pytest.raises(ValueError, match=problem):
        plan(*words)


# --- the managed service -------------------------------------------------------------------------

SERVICE = """
import http.server, json, os, signal, sys, time
mode = sys.argv[1]
names = ("LLM_API_KEY_FILE", "NVRX_ATTRSVC_ENDPOINT", "NVRX_ATTRSVC_ALLOWED_ROOT")
names += ("NVRX_ATTRSVC_STATE_DIR",)
print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
while mode == "late" and not os.path.exists(sys.argv[3]):
    time.sleep(0.02)
if mode == "dies":
    sys.exit(3)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if mode == "never" else 200)
        self.end_headers()
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        print(body, flush=True)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def managed(tmp_path, monkeypatch):
    """Return a function that makes a manager of a stand-in for the service, on a free port."""
    with ports.claimed() as port:
        monkeypatch.setattr(attribution, "DEFAULT_ATTRIBUTION_PORT", port)
        program = tmp_path / "service.py"
        program.write_text(SERVICE)
        made = []

        def make(mode, state_dir=None, **fields):
            command = [sys.executable, str(program), mode, str(port), str(tmp_path / "go")]
            monkeypatch.setattr(attribution, "_command", lambda: command)
            log = str(tmp_path / "logs" / "nvrx" / "job_attribution.log")
            config = AttributionConfig("localhost", str(tmp_path / "logs"), log, **fields)
            made.append(AttributionManager(config, is_store_host=True, state_dir=state_dir))
            return made[-1]

        yield make
        for manager in made:
            manager.stop()


def test_the_service_is_started_asked_and_ended(managed, tmp_path):
    """It gets its settings, its output goes to its log, and nothing of it is left."""
    key = tmp_path / "key"
    key.write_text("k")
    state = str(tmp_path / "state")
    manager = managed("well", state_dir=state, llm_api_key_file=str(key))
    assert manager.start_if_needed() == AttributionEndpoint("http://127.0.0.1:50050")
    pid = manager._child.pid
    manager.stop()
    manager.stop()
    assert not Path(f"/proc/{pid}").exists()
    reported = json.loads((tmp_path / "logs" / "nvrx" / "job_attribution.log").read_text())
    assert reported == {
        "LLM_API_KEY_FILE": str(key),
        "NVRX_ATTRSVC_ENDPOINT": "http://127.0.0.1:50050",
        "NVRX_ATTRSVC_ALLOWED_ROOT": str(tmp_path / "logs"),
        "NVRX_ATTRSVC_STATE_DIR": state,
    }


def test_the_state_of_a_service_outlives_it_where_the_job_has_a_name(tmp_path):
    """A job that is started again by its name finds its history; one without keeps none."""
    log = str(tmp_path / "nvrx" / "job_attribution.log")
    run_dir = str(tmp_path / "run")
    assert attribution.state_dir(log, "42", run_dir) == str(
        tmp_path / "nvrx/job_attribution_state/42"
    )
    assert attribution.state_dir(log, "../a b", run_dir).endswith("/job_attribution_state/.._a_b")
    for unusable in (None, "", "..", "."):
        assert attribution.state_dir(log, unusable, run_dir) == str(
            tmp_path / "run" / "attribution"
        )
    assert attribution.state_dir(None, "42", run_dir) == str(tmp_path / "run" / "attribution")


def test_a_cycle_that_ends_before_the_service_answers_is_submitted(managed, tmp_path, monkeypatch):
    """Its verdict is asked for first; the present cycle's log follows."""
    monkeypatch.setattr(endpoint, "DEFAULT_ATTRIBUTION_PORT", attribution.DEFAULT_ATTRIBUTION_PORT)
    one = Watched(managed("late", startup_timeout=LIMIT_S), job_id="j7", log_complete=True)
    one.watch.begin(0)
    one.watch.ended()
    one.watch.begin(1)
    (tmp_path / "go").touch()
    log = tmp_path / "logs" / "nvrx" / "job_attribution.log"
    deadline = time.monotonic() + LIMIT_S
    while len(reported := log.read_text().splitlines()[1:]) < 2:
        assert time.monotonic() < deadline, reported
        one.loop.run_once(until=time.monotonic() + 0.05)
    one.close()
    first, second = (json.loads(line) for line in reported[:2])
    wanted = {"log_path": "/logs/job_cycle0.log", "analysis_intent": "terminal"}
    wanted |= {"job_id": "j7", "cycle_id": 0, "log_complete": True}
    assert wanted.items() <= first.items()
    wanted = {"log_path": "/logs/job_cycle1.log", "analysis_intent": "progressive", "cycle_id": 1}
    assert wanted.items() <= second.items()


@pytest.mark.parametrize(
    ("mode", "limit_s", "problem"), [("dies", LIMIT_S, "ended: "), ("never", 1.0, "did not answer")]
)
def test_a_service_that_does_not_come_up_is_ended(managed, mode, limit_s, problem):
    """Not ready in time is a TimeoutError, and no process stays behind."""
    manager = managed(mode, startup_timeout=limit_s)
    with pytest.raises(TimeoutError, match=problem):
        manager.start_if_needed()
    assert manager._child is None


def test_a_service_that_ignores_sigterm_is_killed(managed, monkeypatch):
    """SIGTERM, a bounded wait, SIGKILL."""
    monkeypatch.setattr(attribution, "STOP_GRACE_S", 0.2)
    manager = managed("deaf")
    manager.start_if_needed()
    pid = manager._child.pid
    manager.stop()
    assert not Path(f"/proc/{pid}").exists()


def test_a_key_file_that_is_not_there_is_refused(managed):
    """Named and missing is an error; not named is a service without a model."""
    with pytest.raises(ValueError, match="llm-api-key-file /no/key: No such file"):
        managed("well", llm_api_key_file="/no/key").start_if_needed()


def test_a_missing_package_is_one_clear_message(monkeypatch):
    """Without what the service needs the error says what to install."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    manager = AttributionManager(AttributionConfig("localhost", "/a"), is_store_host=True)
    with pytest.raises(NvrxError, match=r"pip install 'nvrx-attribution\[service\]'"):
        manager.start_if_needed()


# --- while a job runs ----------------------------------------------------------------------------


@pytest.fixture
def remote():
    """Return a service on the loopback."""
    with attribution_service() as made:
        yield made


class Watched:
    """A watch on a loop of its own, and what it said."""

    def __init__(self, where, stop_action="no-restart", **more):
        self.clock = SystemClock()
        self.loop = EventLoop(self.clock)
        self.stops = []
        if isinstance(where, str):
            config = AttributionConfig(where, stop_action=stop_action)
            where = AttributionManager(config, is_store_host=True)
        self.watch = AttributionWatch(
            where,
            base_log_file="/logs/job.log",
            token_file=None,
            node_id="n",
            post=self.loop.post,
            on_stop=self.stops.append,
            **more,
        )
        self.watch.start()

    def wait_for_stop(self):
        """Run the loop until STOP arrives."""
        deadline = time.monotonic() + LIMIT_S
        while not self.stops:
            assert time.monotonic() < deadline, "no STOP"
            self.loop.run_once(until=time.monotonic() + 0.1)
        return self.stops

    def close(self):
        self.watch.close()
        self.loop.close()


@pytest.fixture
def watched(remote):
    """Return a function that watches a service."""
    made = []

    def make(url=None, **fields):
        made.append(Watched(url or remote.url, **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_each_cycle_is_submitted_and_asked_for(remote, watched):
    """The log goes to the service when a cycle begins; its end asks for the verdict."""
    watch = watched().watch
    watch.begin(0)
    watch.begin(0)
    remote.wait_for_posts(1)
    remote.decides({"action": "RESTART"})
    watch.ended()
    remote.wait_for_posts(2)
    watch.begin(1)
    assert remote.wait_for_posts(3) == [
        ("progressive", "/logs/job_cycle0.log"),
        ("terminal", "/logs/job_cycle0.log"),
        ("progressive", "/logs/job_cycle1.log"),
    ]


def test_a_submission_names_job_and_cycle(remote, watched):
    """Both submissions of a log say the same; only a log that is written here is complete."""
    for number, log_complete in enumerate((True, False)):
        one = watched(job_id="42", log_complete=log_complete)
        one.watch.begin(3)
        remote.wait_for_posts(2 * number + 1)
        one.watch.ended()
        remote.wait_for_posts(2 * number + 2)
        first, last = remote.bodies[-2:]
        assert [(b["job_id"], b["cycle_id"]) for b in (first, last)] == [("42", 3)] * 2
        assert ("log_complete" in first, last.get("log_complete", False)) == (False, log_complete)


def test_a_store_host_that_only_sees_rounds_close_asks_too(remote, watched):
    """Where no worker runs here, the next round is the end of the one before."""
    watch = watched().watch
    watch.begin(0)
    watch.begin(1)
    assert ("terminal", "/logs/job_cycle0.log") in remote.wait_for_posts(2)


@pytest.mark.parametrize("action", ATTRIBUTION_STOP_ACTIONS)
def test_stop_reaches_the_launcher_only_where_it_is_to_be_obeyed(remote, watched, action, caplog):
    """STOP is an ERROR with a count in the log; with `no-restart` it ends the job."""
    remote.decides({"action": "STOP", "reason": "bad dataset"})
    one = watched(stop_action=action)
    one.watch.begin(0)
    one.watch.ended()
    if action == "no-restart":
        assert one.wait_for_stop() == ["bad dataset"]
    else:
        deadline = time.monotonic() + LIMIT_S
        while "1 so far" not in caplog.text:
            assert time.monotonic() < deadline
            one.loop.run_once(until=time.monotonic() + 0.05)
        assert one.stops == []


def test_bad_nodes_are_handed_on_or_logged(remote, watched, caplog):
    """Names that the analysis gives reach whoever asked for them; else they are in the log."""
    named = ["n1", "n1", 7, "", "a b", "n2"]
    remote.decides({"action": "RESTART", "reason": "off the bus"}, exclude_nodes=named)
    reported = queue.SimpleQueue()
    one = watched(on_nodes=lambda nodes, why: reported.put((nodes, why)))
    one.watch.begin(0)
    one.watch.ended()
    assert reported.get(timeout=LIMIT_S) == (("n1", "n2"), "off the bus")
    other = watched()
    other.watch.begin(1)
    other.watch.ended()
    deadline = time.monotonic() + LIMIT_S
    while "bad nodes: n1, n2: /logs/job_cycle1.log: off the bus" not in caplog.text:
        assert time.monotonic() < deadline
        other.loop.run_once(until=time.monotonic() + 0.05)
    assert one.stops == other.stops == []


@pytest.mark.parametrize("mode", ["hangs", "garbage", "fails", "refuses"])
def test_a_service_that_misbehaves_costs_the_launcher_nothing(remote, watched, monkeypatch, mode):
    """Whatever it does, no call waits for it, and nobody is stopped."""
    monkeypatch.setattr(attribution_client, "_REQUEST_TIMEOUT_S", 60.0)
    remote.mode = mode
    url = NOBODY if mode == "refuses" else None
    one = watched(url)
    before = time.monotonic()
    for cycle in range(20):
        one.watch.begin(cycle)
        one.watch.ended()
    assert time.monotonic() - before < 20.0, "whoever waits for it does so for 60 s"
    before = time.monotonic()
    one.watch.close()
    assert time.monotonic() - before < 20.0, "whoever waits for it does so for 60 s"
    assert one.stops == []


def test_a_client_that_comes_after_the_end_is_stopped(monkeypatch):
    """A service that is ready while the watch is closed leaves no poller behind."""
    done = []

    class Client:
        """Notes what is asked of it; the end comes while it starts."""

        def __init__(self, *_, **__):
            pass

        def start_poller(self, _):
            done.append("start")
            watch.close()

        def stop_poller(self, within_s):
            assert not watch._lock.locked()
            done.append(("stop", within_s))

    monkeypatch.setattr(
        "nvidia_resiliency_ext.shared_utils.attribution_client.AttributionService", Client
    )
    manager = AttributionManager(AttributionConfig(NOBODY), is_store_host=True)
    loop = EventLoop(SystemClock())
    watch = AttributionWatch(
        manager,
        base_log_file="/logs/job.log",
        token_file=None,
        node_id="n",
        post=loop.post,
        on_stop=done.append,
    )
    watch.start()
    loop.close()
    assert done == ["start", ("stop", 0.0)]
