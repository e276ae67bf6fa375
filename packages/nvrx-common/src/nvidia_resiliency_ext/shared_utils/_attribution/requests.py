# SPDX-License-Identifier: Apache-2.0
"""What to send to the attribution service next, and what its answers mean. Pure: no I/O, no clock.

One terminal analysis at a time holds the slot, the oldest first, so that a crash loop cannot starve
it: asked for -> submitted -> accepted (it may be polled) -> verdict or given up. The end of a cycle
that gets no slot is submitted and not polled: the service needs it for the history of the job.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from nvidia_resiliency_ext.shared_utils.attribution_wire import (
    ACTION_STOP,
    INTENT_PROGRESSIVE,
    INTENT_TERMINAL,
)

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils.attribution_wire import LogReply, Recommendation

__all__ = ["Post", "RequestState"]

_MAX_POST_FAILURES = 3
_MAX_POLL_FAILURES = 30
_MOST_ENDS = 16


@dataclass(frozen=True, slots=True)
class Post:
    """A log to submit, and what for."""

    log_path: str
    intent: str
    cycle_id: int | None = None
    evidence: tuple[str, ...] = ()


class RequestState:
    """The state of a client; its owner calls it under a lock.

    Args:
        enforce_stop: A verdict STOP is the last thing that is asked for.
        trust_candidate: A candidate STOP of an analysis that still runs counts as a verdict.
    """

    def __init__(self, *, enforce_stop: bool, trust_candidate: bool = False) -> None:
        self.stop_count = 0
        self._enforce_stop = enforce_stop
        self._trust_candidate = trust_candidate
        self._last: Post | None = None
        self._progressive: Post | None = None
        self._terminal: Post | None = None
        self._ends: deque[Post] = deque(maxlen=_MOST_ENDS)
        self._ended_path = ""
        self._is_accepted = False
        self._failures = 0

    @property
    def poll_path(self) -> str | None:
        """The log whose verdict is awaited, once the service has accepted it."""
        if self._terminal is None or not self._is_accepted or self.is_over:
            return None
        return self._terminal.log_path

    @property
    def is_over(self) -> bool:
        """Whether a verdict has made all further questions pointless."""
        return self._enforce_stop and self.stop_count > 0

    def submit(self, log_path: str, cycle_id: int | None = None) -> None:
        """A cycle begins and writes this log; the newest one wins."""
        self._last = self._progressive = Post(log_path, INTENT_PROGRESSIVE, cycle_id)

    def request_terminal(self, evidence: tuple[str, ...] = ()) -> str | None:
        """The cycle of the last log has ended; return that log if it gets the slot."""
        if self._last is None or self.is_over:
            return None
        end = replace(self._last, intent=INTENT_TERMINAL, evidence=evidence)
        if self._terminal is not None:
            if end.log_path not in {self._terminal.log_path, self._ended_path}:
                self._ends.append(end)
                self._ended_path = end.log_path
                self._drop_progressive()
            return None
        self._ends = deque((post for post in self._ends if post != end), _MOST_ENDS)
        self._terminal = end
        self._is_accepted, self._failures = False, 0
        self._drop_progressive()
        return end.log_path

    def next_post(self) -> Post | None:
        """Return what to submit now; it stays due until it is answered."""
        if self._terminal is not None and not self._is_accepted and not self.is_over:
            return self._terminal
        if self._ends and not self.is_over:
            return self._ends[0]
        return self._progressive

    def posted(self, post: Post, outcome: Literal["accepted", "refused", "failed"]) -> bool:
        """Take the answer to a submission; return whether it was given up.

        A failure of the connection is tried again, a refusal is not.
        """
        if post.intent == INTENT_PROGRESSIVE:
            if self._progressive == post:
                self._progressive = None
            return outcome != "accepted"
        if self._ends and post == self._ends[0]:
            self._ends.popleft()
            return False  # no verdict was asked for, and the posts that matter tell what is wrong
        if outcome == "accepted":
            self._is_accepted, self._failures = True, 0
            return False
        self._failures += 1
        if outcome == "failed" and self._failures < _MAX_POST_FAILURES:
            return False
        self._free()
        return True

    def polled(self, reply: LogReply) -> Recommendation | None:
        """Take an answer to a poll; return the verdict if it holds one."""
        self._failures = 0
        if reply.has_ended:
            verdict = reply.recommendation
        elif self._trust_candidate and reply.candidate.action == ACTION_STOP:
            verdict = reply.candidate
        else:
            return None
        if verdict.action == ACTION_STOP:
            self.stop_count += 1
        self._free()
        return verdict

    def poll_failed(self, *, is_unknown: bool) -> bool:
        """Take a poll without a usable answer; return whether the analysis was given up.

        Args:
            is_unknown: The service says that it does not know this log.
        """
        self._failures += 1
        if is_unknown or self._failures >= _MAX_POLL_FAILURES:
            self._free()
            return True
        return False

    def _drop_progressive(self) -> None:
        if self._progressive == self._last:
            self._progressive = None

    def _free(self) -> None:
        self._terminal, self._is_accepted, self._failures = None, False, 0
