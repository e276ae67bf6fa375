# SPDX-License-Identifier: Apache-2.0
"""The check that asks the site's node health daemon; its answers are foreign."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from .check import Finding, PeriodicCheck, log_once
from .storage import parse_object

_TEXT_LENGTH = 500
_DEFAULT_ARGS = ("--no-slurm", "--group", "prolog", "epilog", "logs", "gpu")
_ANSWER_LIMIT_BYTES = 1 << 20


def socket_of(socket_path: str | None, endpoint: str | None) -> str | None:
    """Return the Unix socket that the arguments mean, the endpoint first; `None` for none."""
    target = endpoint or socket_path
    if not target or "\0" in target:
        return None
    if target.startswith("unix:"):
        target = target.removeprefix("unix:")
        # unix:///path as well as unix:/path
        return target.removeprefix("//") or None
    return target if target.startswith(("/", "./")) or not endpoint else None


def evaluate_answer(answer: Any) -> Finding:
    details = parse_object(answer.output)
    evidence: dict[str, Any] = {"exit_code": answer.exit_code}
    failed: float = 0
    names: object = None
    if details is not None:
        count, names = details.get("fail_count"), details.get("failed_checks")
        failed = count if isinstance(count, int | float) and not isinstance(count, bool) else 0
        evidence |= {"fail_count": failed, "failed_checks": str(names)[:_TEXT_LENGTH]}
    problem = ""
    if failed > 0:
        problem = f"{failed} checks of the node failed: {evidence['failed_checks']}"
    elif isinstance(names, list) and names:
        problem = f"checks of the node failed: {evidence['failed_checks']}"
    elif not answer.success:
        words = answer.error or f"exit code {answer.exit_code}"
        problem = f"the node health daemon says: {words[:_TEXT_LENGTH]}"
    if problem:
        return Finding("unhealthy", problem, evidence)
    reason = "the daemon's answer has no usable details" if details is None else ""
    return Finding("healthy", reason, evidence)


class NodeHealthCheck(PeriodicCheck):
    """Does the node health daemon find anything wrong?

    The socket is looked up at each look, so a daemon that starts later is asked too.

    Args:
        socket_path: The daemon's socket, usually `/var/run/nvhcd/nvhcd.sock`.
        endpoint: The same as `unix://...` or a path; it wins. Anything else is skipped.
        args: Arguments of the daemon's program; `None` for the usual ones.
        interval: Seconds between two looks of `async_check`.
        on_failure: Awaited by `async_check` after an unhealthy look.
        request_timeout_sec: How long the daemon may take.
        on_unreachable: What to think when a target is given and cannot be asked.
    """

    name = "node_daemon"
    # A service that does not answer says nothing about the node.
    late_status = "skipped"

    def __init__(  # noqa: PLR0913 - the contract's signature
        self,
        socket_path: str | os.PathLike[str] | None = None,
        endpoint: str | None = None,
        args: Sequence[str] | None = None,
        interval: float = 60,
        on_failure: Callable[[], Awaitable[object]] | None = None,
        request_timeout_sec: float = 60,
        *,
        on_unreachable: Literal["healthy", "unhealthy"] = "healthy",
    ) -> None:
        super().__init__(interval, on_failure)
        if on_unreachable not in {"healthy", "unhealthy"}:
            raise ValueError(f"on_unreachable is healthy or unhealthy, not {on_unreachable!r}")
        self.socket_path = None if socket_path is None else os.fspath(socket_path)
        self.endpoint = endpoint
        self.args = list(_DEFAULT_ARGS if args is None else args)
        self.request_timeout_sec = request_timeout_sec
        self.on_unreachable = on_unreachable
        self.component = endpoint or self.socket_path or "no daemon"

    def _examine(self) -> Finding:
        path = socket_of(self.socket_path, self.endpoint)
        if path is None:
            words = f"{self.endpoint!r} is no Unix socket"
            return Finding("skipped", words if self.endpoint else "no daemon is given")
        problem = _why_not(path)
        finding = self._unreachable(problem) if problem is not None else self._ask(path)
        if finding.status == "healthy" and finding.reason:
            log_once("daemon details", logging.WARNING, f"node health: {finding.reason}")
        return finding

    def _ask(self, path: str) -> Finding:
        try:
            import grpc

            from nvidia_resiliency_ext.shared_utils.proto import nvhcd_pb2, nvhcd_pb2_grpc
        except ImportError as error:
            return self._unreachable(f"gRPC is missing (pip install 'nvrx-common[grpc]'): {error}")
        request = nvhcd_pb2.HealthCheckRequest(args=self.args)
        options = [
            ("grpc.max_receive_message_length", _ANSWER_LIMIT_BYTES),
            ("grpc.enable_http_proxy", 0),
            # A channel of its own: the daemon may have been replaced since the last look.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        with grpc.insecure_channel(f"unix:{os.path.abspath(path)}", options=options) as channel:
            stub = nvhcd_pb2_grpc.HealthCheckServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                answer = stub.RunHealthCheck(request, timeout=self.request_timeout_sec)
            except grpc.RpcError as error:
                words = f"{error.code().name}: {str(error.details())[:200]}"
                return self._unreachable(f"the daemon cannot be asked: {words}")
        return evaluate_answer(answer)

    def _unreachable(self, reason: str) -> Finding:
        return Finding("unhealthy" if self.on_unreachable == "unhealthy" else "skipped", reason)


def _why_not(path: str) -> str | None:
    """Return why this socket is not to be trusted or not there."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        return f"{path} is not there: {error}"
    if not stat.S_ISSOCK(found.st_mode):
        return f"{path} is no socket"
    if found.st_uid not in {0, os.geteuid()}:
        return f"{path} belongs to user {found.st_uid}, neither root nor ourselves: not asked"
    return None
