# SPDX-License-Identifier: Apache-2.0
"""Answer requests: read the log, decide by rules and history, then ask the models."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._core.errors import UnreadableInputError
from nvidia_resiliency_ext.attribution._policy.history import attempt_of
from nvidia_resiliency_ext.attribution.refine import ModelClient, refine
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nvidia_resiliency_ext.attribution.restart_agent.config import (
        RestartAgentConfig,
        RestartAgentRequest,
    )

__all__ = ["AttemptRecordControl", "RestartAgentRuntime", "build_restart_agent_runtime"]

_MOST_GROWING = 64
_KEYS = frozenset({"job_id", "cycle_id", "progress", "deterministic", "enriched"})


class AttemptRecordControl:
    """Attempts of jobs, as JSON objects; in memory.

    Args:
        max_attempts_per_job: Attempts of a job that are kept; the oldest go first. Default 10.
        max_total_records: Attempts of all jobs that are kept; the oldest go first. Default 3000.
    """

    def __init__(self, max_attempts_per_job: int = 10, max_total_records: int = 3000) -> None:
        self._per_job = max_attempts_per_job
        self._total = max_total_records
        self._records: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def seed(self, records: Iterable[Any]) -> None:
        """Add records of an earlier run.

        Args:
            records: The records, oldest first.

        Raises:
            ConfigError: An element is no attempt record.
        """
        for record in records:
            if not isinstance(record, dict) or set(record) != _KEYS:
                raise ConfigError(f"an attempt record is an object with {', '.join(sorted(_KEYS))}")
            self.add(record)

    def records(self) -> list[dict[str, Any]]:
        """Return all records, the oldest first."""
        with self._lock:
            return [dict(record) for record in self._records]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._records.clear()

    def add(self, record: dict[str, Any]) -> None:
        """Add a record; it replaces one of the same job and cycle.

        Args:
            record: The attempt record.
        """
        key = (record["job_id"], record["cycle_id"])
        with self._lock:
            kept = [
                other
                for other in self._records
                if key[1] is None or (other["job_id"], other["cycle_id"]) != key
            ]
            kept.append(record)
            of_job = [r for r in kept if r["job_id"] == key[0]]
            dropped = {id(r) for r in of_job[: -self._per_job or None]}
            left = [r for r in kept if id(r) not in dropped]
            self._records = left[max(0, len(left) - self._total) :]

    def before(self, job_id: str | None) -> list[dict[str, Any]]:
        """Return the attempts of a job in the form that the engine takes.

        Args:
            job_id: The job.
        """
        return [
            {**record["deterministic"], "job_id": job_id, "cycle_id": record["cycle_id"]}
            for record in self.records()
            if record["job_id"] == job_id and isinstance(record["deterministic"], dict)
        ]


@dataclass
class _Growing:
    """A log between `progressive_start` and `progressive_end`."""

    file: BinaryIO
    scanner: engine.LogScanner
    lock: threading.Lock = field(default_factory=threading.Lock)


class RestartAgentRuntime:
    """Answer requests under one configuration; for all threads.

    Args:
        config: The configuration.

    Attributes:
        attempt_record_control: The attempts that count as history.

    Example:
        >>> with RestartAgentRuntime(parse_restart_agent_config(config)) as agent:  # doctest: +SKIP
        ...     agent.analyze(RestartAgentRequest("/logs/job.log"))["decision"]
        'STOP'
    """

    def __init__(self, config: RestartAgentConfig) -> None:
        self.config = config
        history = config.settings["runtime.history"]
        self.attempt_record_control = AttemptRecordControl(
            history["max_attempts_per_job"], history["max_total_records"]
        )
        self._keeps = history["enabled"]
        self._growing: dict[str, _Growing] = {}
        self._awaited: set[str] = set()  # started, but not there yet
        self._lock = threading.Lock()

    def analyze(
        self,
        request: RestartAgentRequest,
        on_deterministic_ready: Callable[[dict[str, Any]], None] | None = None,
        on_route_complete: Callable[[str, dict[str, Any]], None] | None = None,
        retain_detailed_artifacts: bool = False,
    ) -> dict[str, Any]:
        """Return the response `restart_agent_response.v1`; it waits for the models.

        Args:
            request: The log to evaluate.
            on_deterministic_ready: Gets the response of the rules, before a model is asked.
            on_route_complete: Gets the name of each model's route and its `refinement`.
            retain_detailed_artifacts: Add `nvrx_attribution.v1` as key `attribution`. Default
                False.

        Raises:
            ConfigError: A log ends that was not started.
        """
        try:
            verdict = self._verdict(request)
        except UnreadableInputError as error:
            verdict = engine.LogScanner().finish().with_changes(explanation=str(error))
        if on_deterministic_ready is not None:
            on_deterministic_ready(verdict.to_restart_agent_response())
        is_end = request.analysis_mode != "progressive_start"
        refined = verdict
        if is_end and self.config.routes and verdict.first_fault is not None:
            refined = asyncio.run(self._refined(verdict, on_route_complete))
        if is_end and self._keeps and request.job_id is not None:
            self.attempt_record_control.add(_record(request, verdict, refined))
        response = refined.to_restart_agent_response()
        if retain_detailed_artifacts:
            response["attribution"] = refined.to_dict()
        return response

    def close(self) -> None:
        """Close the logs that were started and not ended; harmless when repeated."""
        with self._lock:
            growing, self._growing = self._growing, {}
        for each in growing.values():
            each.file.close()

    def __enter__(self) -> RestartAgentRuntime:  # noqa: PYI034 - Self came with Python 3.11
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the agent."""
        self.close()

    def _verdict(self, request: RestartAgentRequest) -> engine.Verdict:
        if request.analysis_mode == "terminal":
            growing = self._opened(request)
        else:
            with self._lock:
                growing = self._growing_of(request)
        with growing.lock:
            self._read(growing)
            if request.analysis_mode == "progressive_start":
                return growing.scanner.snapshot()
            growing.file.close()
            if self._keeps:
                history = self.attempt_record_control.before(request.job_id)
                growing.scanner.set_history(history if request.job_id is not None else None)
            return growing.scanner.finish()

    def _growing_of(self, request: RestartAgentRequest) -> _Growing:
        path, is_end = request.log_path, request.analysis_mode == "progressive_end"
        known = path in self._growing or path in self._awaited
        if is_end and not known:
            raise ConfigError(f"{path}: ends, but progressive_start was not called")
        if not known and len(self._growing) + len(self._awaited) >= _MOST_GROWING:
            raise ConfigError(f"{_MOST_GROWING} logs are being read already")
        if is_end:
            self._awaited.discard(path)
            return self._growing.pop(path, None) or self._opened(request)
        if path not in self._growing:
            self._awaited.add(path)
            self._growing[path] = self._opened(request)
            self._awaited.discard(path)
        return self._growing[path]

    def _opened(self, request: RestartAgentRequest) -> _Growing:
        try:
            file = open(request.log_path, "rb", buffering=0)  # noqa: SIM115 - it outlives the call
        except OSError as error:
            raise UnreadableInputError(request.log_path, error.strerror or str(error)) from None
        scanner = engine.LogScanner(
            job_id=request.job_id, cycle_id=request.cycle_id, policy=self.config.policy
        )
        return _Growing(file, scanner)

    def _read(self, growing: _Growing) -> None:
        source = self.config.settings["runtime.l0_source"]
        size = max(1, source["chunk_size_bytes"])
        try:
            if source["read_mode"] == "single_snapshot":
                growing.scanner.feed(growing.file.read())
            while data := growing.file.read(size):
                growing.scanner.feed(data)
        except OSError as error:
            raise UnreadableInputError(growing.file.name, error.strerror or str(error)) from None

    async def _refined(
        self,
        verdict: engine.Verdict,
        on_route_complete: Callable[[str, dict[str, Any]], None] | None,
    ) -> engine.Verdict:
        """Ask all models at once; the answer of the first route that has one counts."""
        turn = asyncio.Semaphore(max(1, self.config.settings["routing"]["max_parallel_models"]))

        async def ask(name: str) -> engine.Verdict:
            async with turn:
                found = await refine(verdict, client=ModelClient(self.config.routes[name]))
            if on_route_complete is not None:
                on_route_complete(name, dict(found.refinement or {}))
            return found

        answers = await asyncio.gather(*(ask(name) for name in self.config.routes))
        used = (answer for answer in answers if (answer.refinement or {}).get("used"))
        return next(used, answers[0])


def build_restart_agent_runtime(config: RestartAgentConfig) -> RestartAgentRuntime:
    """Return a runtime; the caller closes it.

    Args:
        config: The configuration.
    """
    return RestartAgentRuntime(config)


def _record(
    request: RestartAgentRequest, verdict: engine.Verdict, refined: engine.Verdict
) -> dict[str, Any]:
    def kept(found: engine.Verdict) -> dict[str, Any]:
        attempt = attempt_of(found)
        names = ("fingerprint", "entity", "rank", "node", "step", "checkpoint", "is_readable")
        return {
            **{name: getattr(attempt, name) for name in names},
            "decision": found.to_restart_agent_response()["decision"],
            "failure_class": found.reason_code,
        }

    is_enriched = (refined.refinement or {}).get("used", False)
    progress = {
        "last_step": verdict.progress.last_step,
        "last_checkpoint_step": verdict.progress.last_checkpoint_step,
    }
    return {
        "job_id": request.job_id,
        "cycle_id": request.cycle_id,
        "progress": progress,
        "deterministic": kept(verdict),
        "enriched": kept(refined) if is_enriched else None,
    }
