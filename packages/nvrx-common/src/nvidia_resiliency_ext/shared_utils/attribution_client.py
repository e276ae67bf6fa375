# SPDX-License-Identifier: Apache-2.0
"""Ask the attribution service, in a thread, whether a failed job is worth restarting.

`RequestState` decides what to send next and what answers mean, without I/O or a clock;
`AttributionService` is the thread that sends.

One terminal analysis at a time holds the slot, the oldest first, so that a crash loop cannot starve
it: asked for -> submitted -> accepted (it may be polled) -> verdict or given up. The end of a cycle
that gets no slot is submitted and not polled: the service needs it for the history of the job.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from nvidia_resiliency_ext.shared_utils.attribution_wire import (
    ACTION_STOP,
    INTENT_PROGRESSIVE,
    INTENT_TERMINAL,
    ROUTE_LOGS,
    LogQuery,
    LogReply,
    LogSubmission,
    Recommendation,
    parse_log_reply,
)

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils.json_http import JsonConnection

__all__ = ["AttributionService"]

logger = logging.getLogger("nvrx")

_REQUEST_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 2.0
# A log that was read while it grew has its verdict at once: the first questions come sooner.
_FIRST_POLL_S = 0.1
# Who reports a log is about to start workers: until then it has the interpreter to itself.
_CALM_S = 0.25
_HTTP_NOT_FOUND = 404
_HTTP_TOO_MANY = 429
_HTTP_SERVER_ERROR = 500

_MAX_POST_FAILURES = 3
_MAX_POLL_FAILURES = 30
_MOST_ENDS = 16


class RequestState:
    """Submissions and pending questions of a client. Call it under the client's lock.

    A submission gets its job's identity when it is sent. With `enforce_stop` nothing more is asked
    after an answer of STOP.
    """

    def __init__(self, *, enforce_stop: bool) -> None:
        self.stop_count = 0
        self._enforce_stop = enforce_stop
        self.terminal: LogSubmission | None = None
        self._last: LogSubmission | None = None
        self._progressive: LogSubmission | None = None
        self._ends: deque[LogSubmission] = deque(maxlen=_MOST_ENDS)
        self._end_failures = 0
        self._ended_path = ""
        self._is_accepted = False
        self._failures = 0

    @property
    def poll_path(self) -> str | None:
        """The log whose verdict is awaited, once the service has accepted it."""
        if self.terminal is None or not self._is_accepted or self.is_over:
            return None
        return self.terminal.log_path

    @property
    def is_over(self) -> bool:
        """Whether a verdict has made all further questions pointless."""
        return self._enforce_stop and self.stop_count > 0

    def submit(self, log_path: str, cycle_id: int | None = None) -> None:
        """A cycle begins and writes this log; the newest one wins."""
        self._last = self._progressive = LogSubmission(
            log_path, cycle_id=cycle_id, analysis_intent=INTENT_PROGRESSIVE
        )

    def request_terminal(self, evidence: tuple[str, ...] = ()) -> LogSubmission | None:
        """The cycle of the last log has ended; return what is to be submitted, if that is new.

        It is `terminal` if it has the slot.
        """
        if self._last is None or self.is_over:
            return None
        end = replace(self._last, analysis_intent=INTENT_TERMINAL, evidence=evidence)
        if self.terminal is None:
            self._ends = deque((post for post in self._ends if post != end), _MOST_ENDS)
            self.terminal = end
            self._is_accepted, self._failures = False, 0
        elif end.log_path in {self.terminal.log_path, self._ended_path}:
            return None
        else:
            self._ends.append(end)
            self._ended_path = end.log_path
        if self._progressive == self._last:
            self._progressive = None
        return end

    def next_post(self) -> LogSubmission | None:
        """Return the log submission that is due, until it is answered."""
        if self.terminal is not None and not self._is_accepted and not self.is_over:
            return self.terminal
        if self._ends and not self.is_over:
            return self._ends[0]
        return self._progressive

    def posted(
        self, post: LogSubmission, outcome: Literal["accepted", "refused", "failed"]
    ) -> bool:
        """Take the answer to a submission; return whether it was given up.

        A failure of the connection is tried again, a refusal is not.
        """
        if post.analysis_intent == INTENT_PROGRESSIVE:
            if self._progressive == post:
                self._progressive = None
            return outcome != "accepted"
        if post != self.terminal:
            # No verdict was asked for, and the posts that matter tell what is wrong.
            self._end_failures += 1
            if outcome != "failed" or self._end_failures >= _MAX_POST_FAILURES:
                self._end_failures = 0
                if self._ends and post == self._ends[0]:
                    self._ends.popleft()
            return False
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
        if not reply.has_ended:
            return None
        verdict = reply.recommendation
        if verdict.action == ACTION_STOP:
            self.stop_count += 1
        self._free()
        return verdict

    def poll_failed(self, *, is_unknown: bool) -> bool:
        """Take a failed poll, or one of an unknown log; return whether the analysis is given up."""
        self._failures += 1
        if is_unknown or self._failures >= _MAX_POLL_FAILURES:
            self._free()
            return True
        return False

    def _free(self) -> None:
        self.terminal, self._is_accepted, self._failures = None, False, 0


class AttributionService:
    """Asks the attribution service whether a failed job is worth restarting.

    Args:
        endpoint: ``http://host:port``, ``https://host:port`` or ``unix:///path``.
        enforce_stop: Whether a verdict STOP makes `stop_requested` true.
        token_file: File with a bearer token that nobody but its owner can read, read again when
            it changes; default ``NVRX_ATTRSVC_TOKEN_FILE``.
        ca_file: Certificates to trust in place of the system's.
        poll_interval_s: Seconds between two questions for a verdict; the first ones come sooner.
        job_id: Whose logs these are; default: the scheduler's number of the job, of an array that
            of the whole. Tasks that are jobs of their own: `job_metadata.task_id_from_env`.
        log_complete: Whether nothing is written to a log any more when its verdict is asked for.
        on_verdict: Called with action, log and reason of each verdict, in the client's thread. An
            exception of it is logged, as of the next one.
        on_nodes: Called in the client's thread with nodes that an analysis excludes, log, reason.

    Example:
        >>> AttributionService("http://head:8000", enforce_stop=True).stop_requested()
        False
    """

    def __init__(  # noqa: PLR0913 - named, and each of them a fact of its own
        self,
        endpoint: str,
        *,
        enforce_stop: bool = False,
        token_file: str | None = None,
        ca_file: str | None = None,
        poll_interval_s: float = _POLL_INTERVAL_S,
        job_id: str | None = None,
        log_complete: bool = True,
        on_verdict: Callable[[str, str, str], None] | None = None,
        on_nodes: Callable[[tuple[str, ...], str, str], None] | None = None,
    ) -> None:
        from .json_http import parse_endpoint

        self.endpoint = endpoint
        self.enforce_stop = enforce_stop
        self._endpoint = parse_endpoint(endpoint)
        if self._endpoint is None:
            logger.warning("attribution is off: %r is no http, https or unix endpoint", endpoint)
        self._token_file = token_file or os.environ.get("NVRX_ATTRSVC_TOKEN_FILE") or None
        self._ca_file = ca_file
        self._poll_interval_s = poll_interval_s
        self._job_id = job_id
        self._log_complete = log_complete
        self._on_verdict = on_verdict
        self._on_nodes = on_nodes
        self._node_id: str | None = None
        # Guards what follows; waited on by the thread.
        self._changed = threading.Condition()
        self._state = RequestState(enforce_stop=enforce_stop)
        self._not_before_s = 0.0
        # When the thread looks again without being woken; 0: it is not waiting.
        self._looks_at_s = 0.0
        self._complaints: set[str] = set()  # of the thread: what was said and is not over
        self._is_polling = False
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def _submit_log(self, log_path: str, cycle_id: int | None = None) -> None:
        """Have the log of a cycle analysed while it is written; later calls mean this one."""
        with self._changed:
            self._state.submit(log_path, cycle_id)
            self._not_before_s = time.monotonic() + _CALM_S
            self._wake()

    def request_terminal_analysis(self, evidence: tuple[str, ...] = ()) -> bool:
        """The last log is complete: ask for a verdict; `evidence` holds lines about its end.

        Returns:
            Whether it was asked for: while another verdict is pending nothing is done.
        """
        with self._changed:
            end = self._state.request_terminal(evidence)
            if self._endpoint is None or end is None:
                return False
            has_slot = end is self._state.terminal
            self._not_before_s = time.monotonic() + _CALM_S
            self._wake()
        if has_slot:
            self._record("ATTRIBUTION_GET_STARTED")
        return has_slot

    def __call__(self) -> bool:
        """Call `request_terminal_analysis`."""
        return self.request_terminal_analysis()

    def start_poller(self, node_id: str | None = None) -> None:
        """Ask for verdicts from now on; profiling events call this node `node_id`."""
        with self._changed:
            self._node_id = node_id
            self._is_polling = True
            self._wake()

    def stop_poller(self, timeout: float = 5.0) -> None:
        """Send pending submissions and end the thread; abandon it after `timeout` s."""
        with self._changed:
            self._is_polling = False
            self._is_closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def stop_requested(self) -> bool:
        """Return whether the job shall not be restarted; a look at memory."""
        return self.enforce_stop and self.stop_verdict_observed()

    def stop_verdict_observed(self) -> bool:
        """Return whether any verdict was STOP."""
        return self.stop_verdict_count() > 0

    def stop_verdict_count(self) -> int:
        """Return how many verdicts were STOP."""
        return self._state.stop_count

    def _wake(self) -> None:
        """Start the thread if it is not running; the condition is held."""
        if self._endpoint is None:
            return
        self._is_closing = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nvrx-attribution", daemon=True)
            self._thread.start()
        # Whoever starts workers does not share the interpreter with a thread that is not due yet.
        if self._looks_at_s > max(self._not_before_s, time.monotonic()):
            self._changed.notify_all()

    def _run(self) -> None:
        connection: JsonConnection | None = None
        next_poll_s = next_post_s = 0.0
        pause_s = self._poll_interval_s
        try:
            while True:
                with self._changed:
                    work = self._next_work(next_post_s, next_poll_s)
                    if work is None:
                        return
                if connection is None:
                    connection = self._connect()
                if isinstance(work, LogSubmission):
                    has_failed = self._post(connection, work)
                    next_post_s = time.monotonic() + (self._poll_interval_s if has_failed else 0.0)
                    if work.analysis_intent == INTENT_TERMINAL:
                        pause_s = min(_FIRST_POLL_S, self._poll_interval_s)
                        next_poll_s = time.monotonic() + pause_s
                else:
                    self._poll(connection, work)
                    pause_s = min(2 * pause_s, self._poll_interval_s)
                    next_poll_s = time.monotonic() + pause_s
        finally:
            if connection is not None:
                connection.close()

    def _next_work(self, next_post_s: float, next_poll_s: float) -> LogSubmission | str | None:
        """Wait for something to send and return it; `None` at the end. The condition is held."""
        while True:
            now_s = time.monotonic()
            next_post_s = max(next_post_s, self._not_before_s)
            next_poll_s = max(next_poll_s, self._not_before_s)
            post = self._state.next_post()
            if post is not None and (now_s >= next_post_s or self._is_closing):
                return post
            poll_path = self._state.poll_path if self._is_polling else None
            if poll_path is not None and now_s >= next_poll_s:
                return poll_path
            if self._is_closing:
                self._thread = None
                return None
            due = [next_post_s] if post is not None else []
            due += [next_poll_s] if poll_path is not None else []
            self._looks_at_s = min(due, default=math.inf)
            self._changed.wait(max(0.0, min(due) - now_s) if due else None)
            self._looks_at_s = 0.0

    def _connect(self) -> JsonConnection:
        from .credentials import TokenFile
        from .errors import ConfigError
        from .json_http import JsonConnection

        assert self._endpoint is not None
        token = None
        if self._token_file is not None:
            try:
                token = TokenFile(self._token_file)
            except ConfigError as error:
                logger.warning("attribution: no token is sent: %s", error)
        return JsonConnection(self._endpoint, _REQUEST_TIMEOUT_S, token, self._ca_file)

    def _ask(self, send: Callable[[], tuple[int, object]]) -> tuple[int, object, str]:
        """Send a request; return status (0 without one), JSON value, and both in words."""
        from http.client import HTTPException

        try:
            status, payload = send()
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no such path or host
            return 0, None, f"{type(error).__name__}: {error}"
        return status, payload, f"status {status}"

    def _post(self, connection: JsonConnection, post: LogSubmission) -> bool:
        """Submit a log; return whether it has to be tried again."""
        payload = self._submission(post).to_payload()
        status, _, problem = self._ask(lambda: connection.post(ROUTE_LOGS, payload))
        outcome: Literal["accepted", "refused", "failed"] = "failed"
        if 200 <= status < 300:  # noqa: PLR2004 - the successes of HTTP
            outcome = "accepted"
            self._complaints.discard("submission")
        elif 0 < status < _HTTP_SERVER_ERROR and status != _HTTP_TOO_MANY:
            outcome = "refused"
        with self._changed:
            # At the end there is one try only.
            if self._is_closing and outcome == "failed":
                outcome = "refused"
            is_given_up = self._state.posted(post, outcome)
        if is_given_up:
            self._complain("submission", f"{post.log_path} was not submitted: {problem}")
            if post.analysis_intent == INTENT_TERMINAL:
                self._record("ATTRIBUTION_GET_COMPLETED")
        return outcome == "failed"

    def _submission(self, post: LogSubmission) -> LogSubmission:
        from .job_metadata import attempt_index_from_env, job_id_from_env, job_user_from_env

        return replace(
            post,
            user=job_user_from_env() or "unknown",
            job_id=self._job_id or job_id_from_env(),
            log_complete=self._log_complete and post.analysis_intent == INTENT_TERMINAL,
            attempt_index=attempt_index_from_env(),
        )

    def _poll(self, connection: JsonConnection, log_path: str) -> None:
        params = LogQuery(log_path, wait=False).to_params()
        status, payload, problem = self._ask(lambda: connection.get(ROUTE_LOGS, params))
        if status == 200 and isinstance(payload, dict):  # noqa: PLR2004
            self._complaints.clear()
            reply = parse_log_reply(payload)
            with self._changed:
                verdict = self._state.polled(reply)
            if verdict is not None:
                reason = verdict.reason[:500]
                if reply.exclude_nodes:
                    self._call_back("on_nodes", reply.exclude_nodes, log_path, reason)
                text = "attribution: verdict %s for %s%s"
                logger.info(text, verdict.action, log_path, f": {reason}" if reason else "")
                self._record("ATTRIBUTION_GET_COMPLETED")
                self._call_back("on_verdict", verdict.action, log_path, reason)
            return
        if status and not isinstance(payload, dict):
            problem += ", no JSON object"
        with self._changed:
            is_given_up = self._state.poll_failed(is_unknown=status == _HTTP_NOT_FOUND)
        if is_given_up:
            self._complain("verdict", f"no verdict for {log_path}: {problem}")
            self._record("ATTRIBUTION_GET_COMPLETED")

    def _complain(self, request: str, problem: str) -> None:
        """Log a problem of the service, once until such a request succeeds again."""
        level = logging.DEBUG if request in self._complaints else logging.WARNING
        self._complaints.add(request)
        text = "attribution: %s: %s; restarts go on without its verdicts"
        logger.log(level, text, self.endpoint, problem)

    def _call_back(self, name: str, *facts: Any) -> None:
        """Call one of the caller's functions; this is where its errors end."""
        callback = {"on_verdict": self._on_verdict, "on_nodes": self._on_nodes}[name]
        if callback is None:
            return
        try:
            callback(*facts)
        except Exception:
            logger.exception("attribution: %s raised for %s; the client goes on", name, facts[1])

    def _record(self, name: str) -> None:
        from .profiling import ProfilingEvent, record_profiling_event

        record_profiling_event(ProfilingEvent[name], node_id=self._node_id)
