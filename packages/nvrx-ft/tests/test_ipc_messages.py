# SPDX-License-Identifier: Apache-2.0
"""What may travel between ranks, monitor and launcher, and what may not."""

import enum
import pickle
import struct

import pytest

from nvidia_resiliency_ext.fault_tolerance import data
from nvidia_resiliency_ext.fault_tolerance._core.messages import MESSAGES, FtMessageSet
from nvidia_resiliency_ext.shared_utils.errors import WireError
from nvidia_resiliency_ext.shared_utils.wire import FrameReader

RANK_INFO = data.RankInfo(1, 2, "host", 3)
REQUEST = data.WorkloadControlRequest(data.WorkloadAction.ExcludeThisNode, "bad link")


class Colour(enum.Enum):
    """An enum that is not of this package."""

    RED = 1


@pytest.mark.parametrize(
    "message",
    [
        data.AuthkeyMsg("key"),
        data.InitMsg(RANK_INFO, 5, 6),
        data.InitMsg(),
        data.HeartbeatMsg(1, state={"a": [1, 2.5, None, True]}),
        data.SectionMsg(1, "step", data.SectionAction.OPEN, 7),
        data.SectionMsg(1, None, data.SectionAction.CLOSE_ALL),
        data.UpdateConfigMsg(
            data.HeartbeatTimeouts(1.5, None, were_calculated=True),
            data.SectionTimeouts({"a": 1.0, "b": None}, 2.0, {"a"}, True),
            3,
        ),
        data.OkMsg(),
        data.OkMsg(cfg={"rank_section_timeouts": {"a": 1.0}}, self="an attribute"),
        data.ErrorMsg("no"),
        (4, REQUEST),
        [RANK_INFO, {"set": {1, 2}}, (), b"\x00\xff"],
        {1: "a", (2, 3): "b"},
        float("inf"),
        "text with \N{SNOWMAN}",
        None,
    ],
    ids=repr,
)
def test_messages_pass_unchanged(message):
    """Every message comes out as it went in, with its type."""
    [payload] = FrameReader().feed(MESSAGES.encode(message))
    decoded = MESSAGES.decode(payload)
    assert decoded == message
    assert type(decoded) is type(message)


@pytest.mark.parametrize("message", [Colour.RED, object(), len, {"nested": [Colour.RED]}])
def test_other_types_cannot_be_sent(message):
    """What is not in the set is refused where it is sent."""
    with pytest.raises(WireError):
        MESSAGES.encode(message)


def test_a_set_can_be_extended():
    """Both ends may agree on further types."""
    messages = FtMessageSet(Colour)
    [payload] = FrameReader().feed(messages.encode(Colour.RED))
    assert messages.decode(payload) is Colour.RED
    with pytest.raises(WireError):
        MESSAGES.decode(payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        pickle.dumps(data.ErrorMsg("no")),
        b'{"$":"Thread","f":{}}',
        b'{"$":"SectionMsg","f":{"rank":"one","section":"a"}}',
        b'{"$":"SectionAction","v":"EXPLODE"}',
        b'{"$":"OkAttributes","f":{"attributes":[1]}}',
        struct.pack(">I", 10),
    ],
    ids=repr,
)
def test_garbage_is_refused(payload):
    """Whatever is no message of the set is a WireError and nothing else."""
    with pytest.raises(WireError):
        MESSAGES.decode(payload)
