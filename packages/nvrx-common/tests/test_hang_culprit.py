# SPDX-License-Identifier: Apache-2.0
"""Whom a hang is blamed on, as tables: stacks and kernel states, then the ranks together."""

import pytest

from nvidia_resiliency_ext.shared_utils.hang_culprit import (
    Confidence,
    Finding,
    RankState,
    describe,
    find_culprit,
    ranks_in_words,
)
from nvidia_resiliency_ext.shared_utils.rank_activity import (
    Activity,
    Call,
    Kernel,
    Stack,
    classify,
    in_words,
    main_stack,
)

TORCH = "/env/lib/python3.11/site-packages/torch"
DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
{frames}"""


def dump(*frames):
    """Return what faulthandler writes of a main thread with these frames, innermost first."""
    lines = (f'  File "{file}", line {line} in {name}' for file, line, name in frames)
    return DUMP.format(frames="\n".join(lines))


STEP = ("/job/train.py", 68, "train_step")
COLLECTIVE_FRAMES = [
    (f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"),
    (f"{TORCH}/nn/parallel/distributed.py", 1500, "_sync_buffers"),
    ("/env/megatron/core/pipeline_parallel/p2p_communication.py", 100, "_communicate"),
]
DEVICE_FRAMES = [
    (f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"),
    (f"{TORCH}/autograd/__init__.py", 395, "backward"),
    (f"{TORCH}/cuda/__init__.py", 900, "synchronize"),
]
OWN_FRAMES = [
    ("/usr/lib/python3.11/threading.py", 331, "wait"),
    (f"{TORCH}/utils/data/dataloader.py", 1100, "_try_get_data"),
    (f"{TORCH}/distributed/checkpoint/filesystem.py", 200, "_write_files"),
    STEP,
]


@pytest.mark.parametrize(
    ("frames", "call"),
    [
        *[(frame, Call.COLLECTIVE) for frame in COLLECTIVE_FRAMES],
        *[(frame, Call.DEVICE) for frame in DEVICE_FRAMES],
        *[(frame, Call.OWN) for frame in OWN_FRAMES],
    ],
    ids=str,
)
def test_the_innermost_call_tells_a_collective_from_the_programs_own_work(frames, call):
    """A call is known by its innermost frame; the place is the program's own line."""
    assert main_stack(dump(frames, STEP)) == Stack(call, "train.py:68 in train_step")


def test_frames_that_say_nothing_are_passed_over():
    """An operator's wrapper is no place to wait in: the frame that called it is."""
    wrapper = (f"{TORCH}/_ops.py", 1100, "__call__")
    assert main_stack(dump(wrapper, COLLECTIVE_FRAMES[0], STEP)).call is Call.COLLECTIVE


@pytest.mark.parametrize(
    "text", ["", "garbage\n  File", DUMP.format(frames=""), DUMP[:40], "\0" * 99]
)
def test_stacks_that_cannot_be_read_say_nothing(text):
    """No stack, or half of one, is no evidence and no error."""
    assert main_stack(text) == Stack()


FUTEX = "futex_do_wait"
WAITING, WORKING, UNKNOWN = Activity.WAITING, Activity.WORKING, Activity.UNKNOWN
STACKS = {
    "collective": Stack(Call.COLLECTIVE, "a.py:1 in f"),
    "device": Stack(Call.DEVICE, "a.py:1 in f"),
    "own": Stack(Call.OWN, "a.py:1 in f"),
    "none": Stack(),
}
ROWS = [
    # state, wchan, pending; then collective, device, own, none: without and with a GPU
    ("R", "", False, "UWWU", "AUUU"),
    ("S", FUTEX, True, "AAAA", "AAAA"),
    ("S", FUTEX, False, "AUWU", "AAUU"),
    ("S", FUTEX, None, "AAUU", "AAUU"),
    ("S", "do_epoll_wait", False, "AUWU", "AUUU"),
    ("S", "sk_wait_data", None, "AUWU", "AUUU"),
    ("S", "hrtimer_nanosleep", False, "AWWW", "AWWW"),
    ("S", "anon_pipe_read", None, "UWWW", "UWWW"),
    ("D", "folio_wait_bit", None, "UWWW", "UWWW"),
    ("?", "", None, "UUUU", "UUUU"),
]
LETTERS = {"A": WAITING, "W": WORKING, "U": UNKNOWN}


@pytest.mark.parametrize(("state", "wchan", "pending", "plain", "gpu"), ROWS)
def test_what_a_rank_does(state, wchan, pending, plain, gpu):
    """Kernel state, stack and pending collectives together tell who waits for peers."""
    for letters, has_gpu in ((plain, False), (gpu, True)):
        kernel = Kernel(state, wchan, pending, has_gpu)
        found = [classify(kernel, stack) for stack in STACKS.values()]
        assert found == [LETTERS[letter] for letter in letters], has_gpu


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_rank_is_stopped_wherever_it_is(state):
    """Nothing excuses a stopped rank."""
    for stack in STACKS.values():
        assert classify(Kernel(state, FUTEX, is_pending=True), stack) is Activity.STOPPED


def test_words_say_what_the_kernel_sees():
    """The sentence has the deed, the program's line and the kernel's function."""
    stack = STACKS["own"]
    assert in_words(WORKING, Kernel("R"), stack) == "runs in a.py:1 in f"
    assert in_words(WORKING, Kernel("S", "hrtimer_nanosleep"), stack) == (
        "sleeps in a.py:1 in f (hrtimer_nanosleep)"
    )
    assert in_words(WORKING, Kernel("S", FUTEX), stack).startswith("waits for a lock")
    assert "SIGSTOP" in in_words(Activity.STOPPED, Kernel("T"), Stack())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("is stopped", "are stopped"),
        ("sleeps in a.py:1 (nanosleep)", "sleep in a.py:1 (nanosleep)"),
        ("runs", "run"),
    ],
)
def test_several_ranks_that_do_the_same_share_a_verb(words, text):
    """One sentence for all of them, in the plural."""
    ranks = tuple(RankState(rank, WORKING, "h", words) for rank in (0, 1))
    assert describe(Finding(culprits=ranks, confidence=Confidence.LIKELY)).startswith(
        f"ranks 0 and 1 {text}"
    )


def state(rank, activity, *, late=False, moved=False, progress=None, place="p"):
    """Return one rank."""
    return RankState(rank, activity, "h", activity.value, place, late, moved, progress)


def ranks(text, **by_rank):
    """Return ranks from letters (A waits, W works, U unknown, T stopped, F failed, L left)."""
    letters = {**LETTERS, "T": Activity.STOPPED, "F": Activity.FAILED, "L": Activity.LEFT}
    return [state(n, letters[a], **by_rank.get(f"r{n}", {})) for n, a in enumerate(text)]


AT, IN = {"progress": (3, 0)}, {"progress": (3, 1)}
LATE, MOVED = {"late": True}, {"moved": True}
CERTAIN, LIKELY, POSSIBLE, NONE = Confidence
CASES = [
    # ranks, more, world size, culprits, candidates, confidence
    ("AATA", {}, 4, [2], [], CERTAIN),
    ("TATA", {}, 4, [0, 2], [], CERTAIN),
    ("AFTA", {}, 4, [1], [], CERTAIN),
    ("UUUT", {}, 4, [3], [], CERTAIN),
    ("AAWA", {}, 4, [2], [], LIKELY),
    ("AAWL", {}, 4, [2], [], LIKELY),
    ("AUWA", {}, 4, [2], [], LIKELY),
    ("AAUA", {}, 4, [2], [], POSSIBLE),
    ("AAWW", {"r2": AT, "r3": IN}, 4, [2], [], POSSIBLE),
    ("AAWW", {"r2": {"place": "x"}, "r3": {"place": "y"}}, 4, [], [2, 3], NONE),
    ("AAWW", {}, 4, [2, 3], [], POSSIBLE),
    ("AAWW", {"r2": MOVED}, 4, [3], [], LIKELY),
    ("AAWA", {"r2": MOVED}, 4, [2], [], LIKELY),
    ("AAUU", {"r2": {"place": "x"}, "r3": {"place": "y"}}, 4, [], [2, 3], NONE),
    ("AALA", {}, 4, [2], [], LIKELY),
    ("AAAA", {"r0": IN, "r1": IN, "r2": AT, "r3": IN}, 4, [2], [], POSSIBLE),
    ("AAAA", {"r3": {"place": "x"}}, 4, [3], [], POSSIBLE),
    ("AAAA", {}, 4, [], [0, 1, 2, 3], NONE),
    ("UUUU", {"r1": {"place": "x"}}, 4, [1], [], POSSIBLE),
    ("UU", {"r0": {**LATE, "place": "x"}, "r1": {**LATE, "place": "y"}}, 2, [], [0, 1], NONE),
    ("UU", {"r0": {**LATE, **AT}, "r1": {**LATE, **IN}}, 2, [0], [], POSSIBLE),
    ("UW", {"r0": LATE, "r1": MOVED}, 2, [0], [], LIKELY),
    ("WW", {"r0": LATE, "r1": LATE}, 2, [0, 1], [], LIKELY),
    ("W", {"r0": LATE}, 1, [0], [], LIKELY),
]


@pytest.mark.parametrize(("text", "more", "world", "culprits", "candidates", "confidence"), CASES)
def test_whom_a_hang_is_blamed_on(text, more, world, culprits, candidates, confidence):
    """Each row of the decision table, and the order of the rows."""
    found = find_culprit(ranks(text, **more), world)
    assert [r.rank for r in found.culprits] == culprits
    assert [r.rank for r in found.candidates] == candidates
    assert found.confidence is confidence
    assert not found.is_elsewhere
    assert describe(found)


@pytest.mark.parametrize("shuffled", [[3, 1, 2, 0], [2, 3, 0, 1]])
def test_the_order_of_the_ranks_does_not_matter(shuffled):
    """The same ranks in another order give the same verdict."""
    found = ranks("AAWA")
    assert [r.rank for r in find_culprit([found[n] for n in shuffled]).culprits] == [2]


def test_a_node_whose_ranks_all_wait_looks_elsewhere():
    """Where other nodes have ranks, all waiting means that none of these is to blame."""
    found = find_culprit(ranks("AA"), 4)
    assert found.is_elsewhere
    assert (found.culprits, found.candidates) == ((), ())
    assert describe(found) == "ranks 0 and 1 waited for a rank of another host"


def test_sentences():
    """A verdict reads as a sentence, and doubt is said."""
    assert describe(find_culprit(ranks("AATA"))) == (
        "rank 2 on host h stopped; ranks 0, 1 and 3 waited for it"
    )
    assert "probably waited" in describe(find_culprit(ranks("AAUA")))
    assert "cannot be told" in describe(find_culprit(ranks("AAAA")))
    two = ranks("UU", r0={**LATE, "place": "x"}, r1={**LATE, "place": "y"})
    assert "candidates: ranks 0 and 1" in describe(find_culprit(two))


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([2], "rank 2"), ([0, 1], "ranks 0 and 1"), ([0, 1, 3], "ranks 0, 1 and 3"),
     ([*range(7), 8], "ranks 0-6 and 8"), ([5, 4, 3], "ranks 3-5")],
)  # fmt: skip
def test_ranks_in_words(numbers, text):
    """Three or more in a row are a range."""
    assert ranks_in_words(numbers) == text
