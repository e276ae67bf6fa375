# SPDX-License-Identifier: Apache-2.0
"""What a client of the attribution service does next, without any service."""

import pytest

from nvidia_resiliency_ext.shared_utils.attribution_client import RequestState
from nvidia_resiliency_ext.shared_utils.attribution_wire import (
    LogQuery,
    LogReply,
    LogSubmission,
    Recommendation,
    parse_log_reply,
)
from nvidia_resiliency_ext.shared_utils.json_http import Endpoint, parse_endpoint


def post(path, intent, cycle=None, evidence=()):
    """Return what a state has to submit."""
    return LogSubmission(path, cycle_id=cycle, analysis_intent=intent, evidence=evidence)


def reply(action, status="completed"):
    return LogReply(status, Recommendation(action))


def pending(path="/a", **options):
    """Return a state whose terminal analysis the service has accepted."""
    state = RequestState(**{"enforce_stop": False, **options})
    state.submit(path)
    state.posted(state.next_post(), "accepted")
    assert state.request_terminal().log_path == path
    assert state.poll_path is None
    state.posted(state.next_post(), "accepted")
    assert state.poll_path == path
    return state


def test_newest_progressive_wins() -> None:
    """Of several logs that wait to be submitted only the newest is."""
    state = RequestState(enforce_stop=False)
    state.submit("/a")
    state.submit("/b")
    assert state.next_post() == post("/b", "progressive")
    state.posted(post("/a", "progressive"), "accepted")
    assert state.next_post() == post("/b", "progressive")
    state.posted(post("/b", "progressive"), "failed")
    assert state.next_post() is None


def test_nothing_to_ask_without_a_log() -> None:
    """A terminal analysis needs a log that was submitted."""
    assert RequestState(enforce_stop=False).request_terminal() is None


def test_oldest_terminal_analysis_keeps_the_slot() -> None:
    """While a verdict is pending a newer analysis is not asked for; afterwards it is."""
    state = pending("/a")
    state.submit("/b")
    assert state.request_terminal() != state.terminal
    assert state.polled(reply("", "in_flight")) is None
    assert state.polled(reply("CONTINUE")).action == "CONTINUE"
    assert state.request_terminal() == state.terminal
    assert state.next_post() == post("/b", "terminal")


def test_end_of_a_cycle_without_a_slot_is_told_once() -> None:
    """A cycle that ends while a verdict is pending is submitted as ended, and not polled."""
    state = pending("/a")
    state.submit("/b", 1)
    for number in range(3):
        assert (state.request_terminal(("killed",)) is None) == (number > 0)
        assert state.next_post() in (post("/b", "terminal", 1, ("killed",)), None)
        assert not state.posted(post("/b", "terminal", 1, ("killed",)), "accepted")
    assert state.next_post() is None
    assert state.poll_path == "/a"
    for number in range(40):
        state.submit(f"/{number}", number)
        state.request_terminal()
    posts = []
    while (due := state.next_post()) is not None:
        posts.append(due.cycle_id)
        assert not state.posted(due, "failed")
    assert posts == [number for number in range(24, 40) for _ in range(3)], "three tries each"
    state.polled(reply("RESTART"))
    assert state.request_terminal().log_path == "/39"


def test_stop_without_enforcing_frees_the_slot() -> None:
    """A STOP is counted, and the next cycle's log is analysed all the same."""
    state = pending()
    state.polled(reply("STOP"))
    assert (state.stop_count, state.is_over) == (1, False)
    assert state.request_terminal().log_path == "/a"


def test_enforced_stop_ends_all_questions() -> None:
    """After a STOP that counts nothing is polled, and no analysis asked for."""
    state = pending(enforce_stop=True)
    state.polled(reply("STOP"))
    assert state.is_over
    assert state.poll_path is None
    assert state.request_terminal() is None


@pytest.mark.parametrize("action", ["CONTINUE", "RESTART", "UNKNOWN", "TIMEOUT"])
def test_other_verdicts_free_the_slot(action) -> None:
    """Any verdict ends the analysis, only STOP is remembered."""
    state = pending()
    assert state.polled(reply(action)).action == action
    assert (state.stop_count, state.poll_path) == (0, None)


def test_an_analysis_that_runs_has_no_verdict() -> None:
    """What an analysis says before its end is no verdict."""
    assert pending().polled(LogReply("in_flight", Recommendation("STOP"))) is None


def test_submission_is_tried_again_but_not_for_ever() -> None:
    """A broken connection is tried three times, a refusal once."""
    state = RequestState(enforce_stop=False)
    state.submit("/a")
    state.request_terminal()
    due = state.next_post()
    assert [state.posted(due, "failed") for _ in range(3)] == [False, False, True]
    assert state.request_terminal().log_path == "/a"
    assert state.posted(due, "refused")


def test_lost_analysis_is_given_up() -> None:
    """An unknown log frees the slot at once, a silent service after a while."""
    assert pending().poll_failed(is_unknown=True)
    state = pending()
    failures = 1
    while not state.poll_failed(is_unknown=False):
        failures += 1
    assert failures == 30
    assert state.poll_path is None


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("http://h:1", Endpoint("http", "h", 1)),
        ("http://h", Endpoint("http", "h", 80)),
        ("https://h/base/", Endpoint("https", "h", 443, "/base")),
        ("http://[::1]:5", Endpoint("http", "::1", 5)),
        ("unix:///run/a.sock", Endpoint("unix", "/run/a.sock")),
        ("unix://host/a", None), ("unix://", None), ("ftp://h", None), ("h:80", None), ("", None),
        ("http://h:port", None), ("http://h:99999", None), ("http://", None),
        ("http://user:pw@h", None), ("http://[::1", None),
    ],
)  # fmt: skip
def test_endpoints(text, endpoint) -> None:
    """HTTP, HTTPS and Unix sockets are understood, anything else is not."""
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"status": "completed", "recommendation": {"action": "stop", "reason": "r"}},
         LogReply("completed", Recommendation("STOP", "r"))),
        ({"status": 5, "recommendation": []}, LogReply()),
        ({"recommendation": {"action": "FORMAT_DISK", "reason": 7}}, LogReply()),
        ([], LogReply()), (None, LogReply()), ("STOP", LogReply()),
    ],
)  # fmt: skip
def test_replies_are_foreign(payload, expected) -> None:
    """Whatever the reply is, reading it gives a recommendation that we know."""
    assert parse_log_reply(payload) == expected


def test_what_is_sent() -> None:
    """Unknown things are left out; the query says whether to wait."""
    assert LogSubmission("/a").to_payload() == {
        "log_path": "/a", "user": "unknown", "analysis_intent": "track_only",
    }  # fmt: skip
    full = LogSubmission("/a", "me", "7", 3, "terminal", log_complete=True).to_payload()
    assert full["job_id"] == "7"
    assert full["cycle_id"] == 3
    assert full["log_complete"] is True
    assert LogQuery("/a", "f", 2, wait=False).to_params() == {
        "log_path": "/a", "wait": "false", "file": "f", "wl_restart": "2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("attribution", "nodes"),
    [
        (None, ()), ([], ()), ({"exclude_nodes": "n1"}, ()), ({"exclude_nodes": None}, ()),
        ({"exclude_nodes": ["n1", "n-2.site", "10.0.0.1", "fe80::1"]},
         ("n1", "n-2.site", "10.0.0.1", "fe80::1")),
        ({"exclude_nodes": ["n1", "n1", 1, "", "a b", "a\nb", "\u00e9", "x" * 256]}, ("n1",)),
        ({"exclude_nodes": [f"n{i}" for i in range(9999)]}, tuple(f"n{i}" for i in range(4096))),
    ],
)  # fmt: skip
def test_nodes_that_are_named(attribution, nodes) -> None:
    """Only names that a host can have, each once, and not without end."""
    assert parse_log_reply({"attribution": attribution}).exclude_nodes == nodes
