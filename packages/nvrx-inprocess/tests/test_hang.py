# SPDX-License-Identifier: Apache-2.0
"""Whom an interruption by a hang is blamed on, and how ranks tell what they were doing."""

import os
import signal
import threading

import pytest
import torch.distributed as dist

from nvidia_resiliency_ext.inprocess._call import watchdog
from nvidia_resiliency_ext.inprocess._monitor.messages import WAITED
from nvidia_resiliency_ext.inprocess._monitor.page import (
    PageView,
    ProgressPage,
    StackDump,
    observed_before_end,
)
from nvidia_resiliency_ext.inprocess._protocol.decision import (
    Arrival,
    ObservedActivity,
    decide,
    decode_decision,
    encode_decision,
    find_hang,
    format_arrival,
    parse_arrivals,
)
from nvidia_resiliency_ext.inprocess._store.endpoint import ForeignValueError
from nvidia_resiliency_ext.inprocess.attribution import Interruption, InterruptionRecord
from nvidia_resiliency_ext.shared_utils.rank_activity import Activity, Kernel

WAITS = ObservedActivity(Activity.WAITING, "train.py:9 in step")
LOOPS = ObservedActivity(Activity.WORKING, "train.py:5 in load", "runs in train.py:5 in load")
KEEPS = ObservedActivity(
    Activity.UNKNOWN, "x.py:1 in f", "waits in x.py:1 in f, stack: x.py:1 in f"
)


def records(**ranks: int) -> list[InterruptionRecord]:
    """Return one record of each kind, by its name."""
    return [InterruptionRecord(rank, Interruption[kind]) for kind, rank in ranks.items()]


@pytest.mark.parametrize(
    ("reported", "observed", "culprits", "text"),
    [
        ({"SOFT_TIMEOUT": 0}, {0: WAITS, 1: LOOPS}, (1,), "rank 1 runs in train.py:5 in load;"),
        # A collective ran into its own timeout: who raised waited.
        ({"EXCEPTION": 0}, {0: WAITS, 1: LOOPS, 2: WAITS}, (1,), "; ranks 0 and 2 waited for it"),
        # An exception of the program's own is the cause, whoever works at the time.
        ({"EXCEPTION": 0}, {1: LOOPS, 2: WAITS}, None, ""),
        ({"EXCEPTION": 0}, {0: LOOPS, 2: WAITS}, None, ""),
        # So is a rank that is gone, whatever the collectives of the others raised.
        ({"EXCEPTION": 0, "TERMINATED": 2}, {0: WAITS, 1: LOOPS}, None, ""),
        ({"SOFT_TIMEOUT": 0, "BASE_EXCEPTION": 1}, {0: WAITS, 2: LOOPS}, None, ""),
        # The stack of one that was killed is given though no rank can be blamed.
        ({"HARD_TIMEOUT": 0}, {0: KEEPS}, (0,), "rank 0 waits in x.py:1 in f, stack: x.py:1"),
        ({"HARD_TIMEOUT": 0}, {0: KEEPS, 1: LOOPS, 2: WAITS}, (1,), "; rank 0 waits in x.py"),
        # Also where the program's own exception is the cause, which nobody is blamed for here.
        ({"HARD_TIMEOUT": 0, "EXCEPTION": 1}, {0: KEEPS}, (), "rank 0 waits in x.py:1 in f, stack"),
        ({"SOFT_TIMEOUT": 0}, {0: WAITS, 1: WAITS}, None, ""),
        ({"SOFT_TIMEOUT": 0}, {}, None, ""),
    ],
)  # fmt: skip
def test_whom_a_hang_is_blamed_on(
    reported: dict[str, int],
    observed: dict[int, ObservedActivity],
    culprits: tuple[int, ...] | None,
    text: str,
) -> None:
    """Only a hang is looked into, and only what ranks were seen to do is held against them."""
    hang = find_hang(records(**reported), observed, 3)
    assert (hang and hang.culprits) == culprits
    assert text in (hang.text if hang else "")


def test_the_decision_carries_what_its_arrivals_say() -> None:
    """Texts of a program come back as they were, as one line; all ranks read the same verdict."""
    odd = ObservedActivity(
        Activity.WORKING, "a;b:c%,é.py:1 in <listcomp>", "runs; in: a,b 100%\nsecond line"
    )
    told = [
        Arrival(0, 0, 3, is_out=False, observed=WAITS),
        Arrival(1, 1, 3, is_out=False, observed=odd),
        Arrival(2, None, None, is_out=False, observed=KEEPS),
    ]
    text = "".join(map(format_arrival, told))
    assert text.isascii()
    arrivals = parse_arrivals(text)
    assert [each.observed and each.observed.place for each in arrivals] == [
        each.observed and each.observed.place for each in told
    ]
    decision = decide(arrivals, frozenset(range(3)), records(SOFT_TIMEOUT=0, HARD_TIMEOUT=2))
    read = decode_decision(encode_decision(decision))
    assert read.hang is not None
    assert read.hang == decision.hang
    assert read.hang.text == (
        "rank 1 runs; in: a,b 100% second line; rank 0 waited for it;"
        " rank 2 waits in x.py:1 in f, stack: x.py:1 in f"
    )


@pytest.mark.parametrize("text", ["0:0:2:;", "0:0:2:dances,,;", "0:?:working,a;", "0:0:2:a:b;"])
def test_foreign_words_are_named(text: str) -> None:
    """What stands behind an arrival, and no rank has said, is an error with the key."""
    with pytest.raises(ForeignValueError, match="arrivals"):
        parse_arrivals(text)


def test_what_the_main_thread_does_is_seen_from_another_one() -> None:
    """The place is the program's own line, though the main thread sits in the library's."""
    found: list[watchdog.MainThreadActivity] = []
    thread = threading.Thread(target=lambda: found.append(watchdog.of_main_thread()))
    thread.start()
    thread.join()
    assert found[0].call == "own"
    assert "test_hang.py" in found[0].place


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] closed"), WAITED),
        (dist.DistBackendError("NCCL error"), WAITED),
        (RuntimeError("shapes do not fit"), ""),
        (ValueError("a tensor is expected"), ""),
    ],
)
def test_an_exception_of_a_collective_is_that_of_a_rank_that_waited(
    error: Exception, call: str
) -> None:
    """What a transport raises says nothing against the rank in which it was raised."""

    def collective() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        collective()
    told = watchdog.of_raised(caught.value)
    assert told.call == call
    assert told.place.endswith("in collective") == bool(call)


def test_stacks_are_written_at_the_signal() -> None:
    """A process that is asked for its stacks writes them, and has its signal back afterwards."""
    page, dump = ProgressPage.create(), StackDump()
    number = dump.number
    view = PageView(os.dup(page.fd), os.dup(dump.fd))
    try:
        assert view.read_dump() == ""
        os.kill(os.getpid(), number)
        observed = observed_before_end(Kernel("S", "hrtimer_nanosleep"), view.read_dump())
    finally:
        for each in (view, dump, page):
            each.close()
    assert observed.activity is Activity.WORKING
    assert observed.words.startswith("sleeps in test_hang.py:")
    assert "in test_stacks_are_written_at_the_signal" in observed.words
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_process_that_cannot_write_stacks_is_described_by_the_kernel() -> None:
    """Without a free signal there is no dump, and the kernel's view is all there is."""
    page = ProgressPage.create()
    view = PageView(os.dup(page.fd))
    observed = observed_before_end(Kernel("T"), view.read_dump())
    view.close()
    page.close()
    assert observed == ObservedActivity(Activity.STOPPED, "", "is stopped (SIGSTOP or a debugger)")
