# SPDX-License-Identifier: Apache-2.0
"""`RankMonitorClient.should_checkpoint` against a real monitor process."""

import pytest
from monitored_ranks import Node

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvidia_resiliency_ext.fault_tolerance._monitor import messages
from nvidia_resiliency_ext.fault_tolerance._monitor.slot import SAVE_ASKED, read_slot


@pytest.fixture
def node(tmp_path):
    """Return a monitor for two ranks."""
    made = Node(tmp_path, count=2, rank_section_timeouts={"step": 60.0})
    yield made
    made.close()


def calls(node, index=0):
    """Return how often a rank has called, as the launcher sees it."""
    return read_slot(node.monitor.slots[index], node.monitor.layout).save_calls


def say(node, word):
    """Put a word into the slots and wait until it is there."""
    node.monitor.send(messages.Save(word))
    assert node.expect(messages.Save).word == word


def test_without_a_session_it_is_refused():
    """As every call of the client."""
    with pytest.raises(RankMonitorClientError, match="not initialised"):
        RankMonitorClient().should_checkpoint()


def test_nothing_announced_is_false_and_counted(node):
    """Calls return False at once, and the launcher sees their number."""
    rank = node.rank()
    assert rank.do("init", "save", "save", "save") == "False"
    assert calls(node) == 3


def test_a_rank_waits_until_it_is_agreed_where_to_save(node):
    """Once asked, the next call waits; then it is True from the agreed call on."""
    rank = node.rank()
    rank.do("init", "save")
    say(node, SAVE_ASKED)
    rank.order("save")
    say(node, 4)
    assert rank.answer() == "ok False"
    assert [rank.do("save") for _ in range(3)] == ["False", "True", "True"]


def test_a_rank_that_comes_later_knows_it_too(node):
    """The word is in the slot of a session that opens after it was said, also a second one."""
    say(node, 2)
    rank = node.rank()
    assert rank.do("init", "save") == "False"
    assert rank.do("save") == "True"
    assert rank.do("shutdown", "init", "save") == "False"


def test_a_rank_that_waits_finds_a_new_monitor(node):
    """When the monitor dies while a rank waits, the new one's answer frees it."""
    rank = node.rank()
    rank.do("init", "save")
    say(node, SAVE_ASKED)
    rank.order("save")
    node.monitor.child.signal(9)
    node.monitor.child.wait(10.0)
    node.monitor.close()
    node.messages.clear()
    # As the launcher tells it: a rank that comes back at once must not find that nothing is asked.
    node.order["save_word"] = SAVE_ASKED
    node.start_monitor()
    node.expect(messages.RankJoined)
    say(node, 2)
    assert rank.answer() == "ok True"


def test_taking_the_word_back_lets_ranks_go_on(node):
    """A cycle that ends otherwise leaves nobody waiting."""
    rank = node.rank()
    rank.do("init")
    say(node, SAVE_ASKED)
    rank.order("save")
    say(node, 0)
    assert rank.answer() == "ok False"
