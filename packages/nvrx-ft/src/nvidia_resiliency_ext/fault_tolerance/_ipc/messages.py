# SPDX-License-Identifier: Apache-2.0
"""The closed set of messages that ranks, their monitor and the launcher may send each other."""

from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.fault_tolerance.data import (
    AuthkeyMsg,
    ErrorMsg,
    HeartbeatMsg,
    HeartbeatTimeouts,
    InitMsg,
    OkMsg,
    RankInfo,
    SectionAction,
    SectionMsg,
    SectionTimeouts,
    UpdateConfigMsg,
    WorkloadAction,
    WorkloadControlRequest,
)
from nvidia_resiliency_ext.shared_utils.wire import MessageSet

__all__ = ["MESSAGES", "FtMessageSet"]


@dataclass(frozen=True, slots=True)
class OkAttributes:
    """`OkMsg` as it travels: its attributes have no fixed names."""

    attributes: dict[str, Any]


class FtMessageSet(MessageSet):
    """All messages of `data`, and those given; an `OkMsg` passes as a message of its own only.

    Args:
        extra: further dataclasses and enums that may appear in messages.

    Example:
        >>> [payload] = FrameReader().feed(FtMessageSet().encode(OkMsg(cycle=3)))
        >>> FtMessageSet().decode(payload)
        OkMsg(cycle=3)
    """

    def __init__(self, *extra: type) -> None:
        super().__init__(
            AuthkeyMsg,
            ErrorMsg,
            HeartbeatMsg,
            HeartbeatTimeouts,
            InitMsg,
            OkAttributes,
            RankInfo,
            SectionAction,
            SectionMsg,
            SectionTimeouts,
            UpdateConfigMsg,
            WorkloadAction,
            WorkloadControlRequest,
            *extra,
        )

    def encode(self, message: object) -> bytes:
        """Return the whole frame of a message, length included.

        Raises:
            WireError: it holds what is not in the set, or is too large.
        """
        if isinstance(message, OkMsg):
            message = OkAttributes(vars(message))
        return super().encode(message)

    def decode(self, payload: bytes) -> object:
        """Return the message of a payload, as `FrameReader` yields it.

        Raises:
            WireError: it is no message of the set.
        """
        message = super().decode(payload)
        return OkMsg(**message.attributes) if isinstance(message, OkAttributes) else message


MESSAGES = FtMessageSet()
