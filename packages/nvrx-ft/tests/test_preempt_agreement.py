# SPDX-License-Identifier: Apache-2.0
"""At which call ranks save: they never save at different ones, and nobody waits for ever."""

import random

import pytest

from nvidia_resiliency_ext.fault_tolerance._agent.preemption import end_of_job
from nvidia_resiliency_ext.fault_tolerance._core.machine import agreed_call
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

ASKED = -1


class Rank:
    """A rank in lock-step: it begins a step when all have ended the one before."""

    def __init__(self):
        self.word = 0
        self.calls = 0
        self.seen = 0  # the call that it has left with False
        self.saved_at = None

    def can_go(self, ranks):
        """Whether the collective of its next step can end, and it has not saved."""
        return self.saved_at is None and all(r.calls >= self.seen for r in ranks)

    def enter(self):
        """Show the count; `leave` looks at the word, any time later."""
        self.calls = self.seen + 1

    def leave(self):
        """Look at the word; while saving is asked for, stay."""
        if self.word == ASKED:
            return
        if 0 < self.word <= self.calls:
            self.saved_at = self.calls
        else:
            self.seen = self.calls


def play(seed):
    """Let ranks, nodes and the agreement take their steps in a random order."""
    chance = random.Random(seed)
    ranks = [Rank() for _ in range(chance.randint(1, 6))]
    nodes = [ranks[i::2] for i in range(2) if ranks[i::2]]
    asked_after = chance.randint(0, 200)
    reported, agreed = {}, None
    for tick in range(20_000):
        if all(rank.saved_at is not None for rank in ranks):
            return {rank.saved_at for rank in ranks}
        move = chance.randrange(len(ranks) + 3)
        if move < len(ranks):
            rank = ranks[move]
            if rank.calls > rank.seen:
                rank.leave()
            elif rank.can_go(ranks):
                rank.enter()
        elif move == len(ranks) and tick > asked_after and len(reported) < len(nodes):
            # A node asks its ranks one by one, and reads the counts when all are asked.
            node = chance.choice([i for i in range(len(nodes)) if i not in reported])
            open_ = [rank for rank in nodes[node] if rank.word == 0]
            if open_:
                chance.choice(open_).word = ASKED
            else:
                reported[node] = max(rank.calls for rank in nodes[node])
        elif len(reported) == len(nodes):
            agreed = agreed or agreed_call(reported.values())
            untold = [rank for rank in ranks if rank.word == ASKED]
            if untold:
                chance.choice(untold).word = agreed
    raise AssertionError(f"seed {seed}: they wait for ever: {[vars(rank) for rank in ranks]}")


def test_in_whatever_order_things_happen_all_ranks_save_at_one_call():
    """1000 random orders of ranks and nodes: one call for all, and no deadlock."""
    for seed in range(1000):
        assert len(play(seed)) == 1, f"seed {seed}"


@pytest.mark.parametrize(("calls", "at"), [([], 1), ([0, 0], 1), ([3, 7], 8)])
def test_the_agreed_call_lies_before_everybody(calls, at):
    """It is one more than the furthest rank has made, and the first for ranks that made none."""
    assert agreed_call(calls) == at


def test_the_end_of_a_job_comes_from_slurm_a_length_or_a_time():
    """The three forms of a deadline, and none."""
    assert end_of_job(None, {}, 100.0) is None
    assert end_of_job("+50", {}, 100.0) == 150.0
    assert end_of_job("1234.5", {}, 100.0) == 1234.5
    assert end_of_job("slurm", {"SLURM_JOB_END_TIME": "900"}, 100.0) == 900.0


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_END_TIME": "soon"}])
def test_slurm_that_does_not_tell_is_an_error(environ):
    """A job that counts on Slurm's end time must not run without knowing it."""
    with pytest.raises(ConfigError, match="SLURM_JOB_END_TIME is"):
        end_of_job("slurm", environ, 0.0)
