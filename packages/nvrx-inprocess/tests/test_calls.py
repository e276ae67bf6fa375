# SPDX-License-Identifier: Apache-2.0
"""Wrapped calls by real ranks: what comes back to the function, and what to its caller."""

from pathlib import Path

import jobs
import pytest

pytestmark = pytest.mark.timeout(jobs.DEADLINE_S + 30)


def seen(rank: int, iteration: int, world_size: int) -> dict[str, object]:
    """Return what a function sees of itself."""
    return {"iteration": iteration, "rank": str(rank), "world_size": str(world_size)}


def test_calls_of_three_ranks(tmp_path: Path) -> None:
    """Whatever one rank raises or misses, all are in the function again, and then return."""
    calls = (
        "returns", "one_raises", "all_raise", "asks_for_restart", "reserve", "hangs", "collective",
        "in_atomic", "gives_up", "returns", "left_over",
    )  # fmt: skip
    ended = jobs.run_calls(tmp_path, 3, *calls)
    texts = "\n".join(end.text[-3000:] for end in ended)
    assert [end.code for end in ended] == [0, 0, 0], texts
    for rank, end in enumerate(ended):
        results = dict(zip(calls, end.results, strict=True))
        assert results["returns"] == [rank * 10, seen(rank, 0, 3)]
        for name in ("one_raises", "all_raise", "asks_for_restart", "hangs"):
            assert results[name] == seen(rank, 1, 3), name
        assert results["reserve"] == (seen(rank, 1, 2) if rank < 2 else None)
        assert results["collective"] == [seen(rank, 1, 3), 3.0]
        assert results["in_atomic"] == [seen(rank, 1, 3), "begin and end" if rank else ""]
        message, terminated = results["gives_up"]
        assert "iteration=2" in message
        assert terminated == [2]
        assert results["left_over"] == [0, [], str(rank), "3"]


def test_a_killed_rank_is_done_without(tmp_path: Path) -> None:
    """The others call the function again with the ranks that are left, and return; twice."""
    ended = jobs.run_calls(tmp_path, 3, "killed")
    assert [end.code for end in ended] == [0, 0, -9], ended[0].text[-3000:]
    for rank, end in enumerate(ended[:2]):
        who, terminated, phases = end.results[0]
        assert who == seen(rank, 1, 2)
        assert terminated == [2]
        assert {"abort", "unwind", "barrier", "initialize"} <= set(phases)


def test_the_first_rank_may_be_killed(tmp_path: Path) -> None:
    """Rank 0 hosts nothing that the others need."""
    ended = jobs.run_calls(tmp_path, 3, "first_killed")
    assert [end.code for end in ended] == [-9, 0, 0], ended[1].text[-3000:]
    assert [end.results[0] for end in ended[1:]] == [seen(0, 1, 2), seen(1, 1, 2)]


def test_a_rank_may_leave(tmp_path: Path) -> None:
    """SystemExit ends the rank that raised it, with its code; the others go on."""
    ended = jobs.run_calls(tmp_path, 3, "exits")
    assert [end.code for end in ended] == [7, 0, 0], ended[1].text[-3000:]
    assert [end.results[0] for end in ended[1:]] == [seen(0, 1, 2), seen(1, 1, 2)]


def test_nobody_restarts_for_a_lost_monitor(tmp_path: Path) -> None:
    """A killed monitor is replaced, and the functions go on undisturbed."""
    ended = jobs.run_calls(tmp_path, 2, "monitor_killed")
    assert [end.code for end in ended] == [0, 0], ended[0].text[-3000:]
    assert [end.results[0] for end in ended] == [seen(0, 0, 2), seen(1, 0, 2)]
