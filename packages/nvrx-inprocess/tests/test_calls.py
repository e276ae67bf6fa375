# SPDX-License-Identifier: Apache-2.0
"""Wrapped calls by real ranks: what comes back to the function, and what to its caller."""

import re
from collections.abc import Iterator
from pathlib import Path

import chaos
import jobs
import pytest
from fork_server import ForkServer
from results import no_second_try

pytestmark = [pytest.mark.timeout(jobs.DEADLINE_S + 30), pytest.mark.slow]


@pytest.fixture(scope="module")
def ddp_server() -> Iterator[ForkServer]:
    """Run programs in processes that have what DistributedDataParallel imports at its first use."""
    with jobs.server_of(jobs.TORCH_WITH_DDP) as server:
        yield server


def seen(rank: int, iteration: int, world_size: int) -> dict[str, object]:
    """Return what a function sees of itself."""
    return {"iteration": iteration, "rank": str(rank), "world_size": str(world_size)}


def test_calls_of_three_ranks(fork_server: ForkServer, tmp_path: Path) -> None:
    """Whatever one rank raises or misses, all are in the function again, and then return.

    For a monitor that is killed nobody restarts.
    """
    calls = (
        "returns", "one_raises", "all_raise", "asks_for_restart", "reserve", "hangs", "collective",
        "group_after_abort",
        "in_init_by_store", "in_init_by_port", "in_init_as_host", "in_atomic", "gives_up",
        "monitor_killed", "many_restarts", "forks", "nested", "monitor_gone", "returns",
        "left_over",
    )  # fmt: skip
    ended = jobs.run_calls(fork_server, tmp_path, 3, *calls)
    texts = "\n".join(end.text[-3000:] for end in ended)
    assert [end.code for end in ended] == [0, 0, 0], texts
    for rank, end in enumerate(ended):
        results = dict(zip(calls, end.results, strict=True))
        assert results["returns"] == [rank * 10, seen(rank, 0, 3)]
        for name in ("one_raises", "all_raise", "asks_for_restart", "group_after_abort"):
            assert results[name] == seen(rank, 1, 3), name
        # Who stands still for a second later, as on a busy host, hangs as well.
        restarts = ended[0].results[calls.index("hangs")]["iteration"]
        assert restarts >= 1
        assert results["hangs"] == seen(rank, restarts, 3)
        value, is_ready = results["reserve"]
        assert value == (seen(rank, 1, 2) if rank < 2 else None)
        assert is_ready or rank < 2, "a reserve has what DistributedDataParallel imports late"
        assert results["collective"] == [seen(rank, 1, 3), 3.0]
        for name in ("in_init_by_store", "in_init_by_port"):
            total, entered, took_s = results[name]
            assert (total, entered) == (3.0, 2), name
            assert took_s < 20.0, name
        assert results["in_init_as_host"] < 20.0
        assert results["in_atomic"] == [seen(rank, 1, 3), "begin and end" if rank else ""]
        assert results["monitor_killed"] == seen(rank, 0, 3)
        early, late = results["many_restarts"]
        # Threads and descriptors: none more; one of an earlier call may just have ended.
        assert late[0] <= early[0]
        assert late[1] <= early[1]
        assert late[2] < early[2] + 4
        assert results["forks"] == [seen(rank, 0, 3), [4, 4]]
        assert results["nested"][0] == 1
        if rank < 2:
            assert results["monitor_gone"][0] == seen(rank, 1, 2)
            assert "MONITOR_PROCESS_EXCEPTION" in results["monitor_gone"][1]
        else:
            assert "no monitor any more" in results["monitor_gone"]
        message, terminated = results["gives_up"]
        # Who has not looked yet when another one gives up looks in the next iteration.
        assert terminated in ([2], [3], [4])
        assert f"iteration={terminated[0]} self.max_iterations=2" in message
        assert results["left_over"] == [0, [], str(rank), "3"]


def test_tries_and_leftovers(fork_server: ForkServer, tmp_path: Path) -> None:
    """Ranks that have tried unequally often meet; a call leaves nothing for the collector."""
    ended = jobs.run_calls(fork_server, tmp_path, 2, "tries_again", "without_collector", "returns")
    assert [end.code for end in ended] == [0, 0], "\n".join(end.text[-3000:] for end in ended)
    for rank, end in enumerate(ended):
        (tries, world), (before, after, stores), returned = end.results
        assert tries >= 1 + rank
        assert world == "2"
        assert (after, stores) == (before, 0)
        assert returned == [rank * 10, seen(rank, 0, 2)]


def test_training_with_restarts_comes_to_the_same(ddp_server: ForkServer, tmp_path: Path) -> None:
    """Weights after four restarts, in which each rank raises, are those of a run in peace."""
    ended = jobs.run_calls(ddp_server, tmp_path, 3, "trains_in_peace", "trains")
    assert [end.code for end in ended] == [0, 0, 0], "\n".join(end.text[-3000:] for end in ended)
    for end in ended:
        (restarts, *weights), (more_restarts, *same_weights) = end.results
        with no_second_try():
            assert same_weights == weights
        assert (restarts, more_restarts) == (0, 4)


def test_who_waits_in_backward_is_kept(ddp_server: ForkServer, tmp_path: Path) -> None:
    """A rank that waits in backward when the other one fails comes back each time.

    What ends its collective, and what frees its model, do not wait for each other; the groups of
    20 iterations have left no threads.
    """
    ended = jobs.run_calls(ddp_server, tmp_path, 2, "in_backward")
    assert [end.code for end in ended] == [0, 0], "\n".join(end.text[-3000:] for end in ended)
    for rank, end in enumerate(ended):
        who, threads = end.results[0]
        assert who == seen(rank, 20, 2)
        # Three for each group: torch keeps that of the DDP before, until there is another one.
        assert threads <= 6


def test_a_group_that_cannot_be_made_again_gets_a_hint(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """A group that fails in a later iteration is logged with advice about old keys; once each."""
    (end,) = jobs.run_calls(fork_server, tmp_path, 1, "no_group")
    assert (end.code, end.results) == (0, [2]), end.text[-3000:]
    assert end.text.count("in init_process_group") >= 2
    assert end.text.count("give init_process_group store=PrefixStore(str(call.iteration)") == 1


def test_who_is_lost_is_done_without(fork_server: ForkServer, tmp_path: Path) -> None:
    """Ranks are killed, rank 0 among them, and one leaves with its own code; the rest go on."""
    ended = jobs.run_calls(fork_server, tmp_path, 4, "losses")
    assert [end.code for end in ended] == [-9, 7, 0, -9], ended[2].text[-3000:]
    who, terminated, phases = ended[2].results[0]
    assert who == seen(0, 3, 1)
    assert terminated == [[3], [0], [1]]
    assert {"abort", "unwind", "barrier", "initialize"} <= set(phases)


def test_who_hangs_is_named(fork_server: ForkServer, tmp_path: Path) -> None:
    """Every rank that goes on names the rank that hung, in its log and its report.

    One that loops in Python stamps like a healthy one; one that keeps the GIL is killed, and its
    stack is logged.
    """
    ended = jobs.run_calls(fork_server, tmp_path, 3, "one_loops", "one_keeps_the_gil")
    assert [end.code for end in ended] == [0, -15, 0], "\n".join(end.text[-3000:] for end in ended)
    for end in (ended[0], ended[2]):
        (loops, *_), (keeps, *_) = end.results
        assert re.fullmatch(
            r"rank 1 \w.* in calls\.py:\d+ in loop_for_ever.*; ranks 0 and 2 waited for it", loops
        )
        assert re.match(r"rank 1 waits.* in calls\.py:\d+ in keep_the_gil", keeps)
        assert re.search(
            r", stack: calls\.py:\d+ in keep_the_gil < calls\.py:\d+ in function;", keeps
        )
        for hang in (loops, keeps):
            assert f"{hang} (" in end.text


@pytest.mark.no_second_try
def test_random_faults(ddp_server: ForkServer, tmp_path: Path) -> None:
    """Whatever happens to whom and when, the others end with the right result.

    In this plan are eleven of the twelve moments, all those of a restart among them.
    """
    report = chaos.run_job(ddp_server, tmp_path, seed=7433, job=0, trials=12)
    assert not report.wrong, "\n".join(report.wrong)
