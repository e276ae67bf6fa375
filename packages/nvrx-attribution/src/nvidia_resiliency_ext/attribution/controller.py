# SPDX-License-Identifier: Apache-2.0
"""The service without its protocol: an analyzer, its stored results, exports, and its health."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from nvidia_resiliency_ext.attribution import engine
from nvidia_resiliency_ext.attribution._live.history import JobHistory
from nvidia_resiliency_ext.attribution._live.journal import SubmissionJournal
from nvidia_resiliency_ext.attribution._live.sessions import SessionTimes
from nvidia_resiliency_ext.attribution.analyzer import Analyzer, CompletedAnalysis
from nvidia_resiliency_ext.attribution.api_keys import (
    llm_api_key_missing_message,
    load_llm_api_key,
)
from nvidia_resiliency_ext.attribution.coalescing.coalescer import RequestCoalescer
from nvidia_resiliency_ext.attribution.orchestration.config import DEFAULT_COMPUTE_TIMEOUT_SECONDS
from nvidia_resiliency_ext.attribution.orchestration.types import (
    AttributionRecommendation,
    LogAnalysisCycleResult,
    LogAnalysisSplitlogResult,
    LogAnalyzerFilePreview,
    LogAnalyzerSubmitResult,
)
from nvidia_resiliency_ext.attribution.postprocessing.pipeline import (
    ResultPoster,
    post_analysis_items,
)
from nvidia_resiliency_ext.attribution.postprocessing.post_backend import HttpPoster
from nvidia_resiliency_ext.attribution.postprocessing.slack import (
    format_slack_text,
    post_slack_message,
    should_notify_slack,
)
from nvidia_resiliency_ext.attribution.refine import (
    ModelClient,
    ModelSettings,
    refine,
    service_model_settings,
)
from nvidia_resiliency_ext.attribution.restart_agent.config import (
    RestartAgentConfig,
    load_restart_agent_config,
)
from nvidia_resiliency_ext.shared_utils.errors import ConfigError, MissingExtraError
from nvidia_resiliency_ext.shared_utils.os_utils import (
    atomic_write,
    private_dir,
    read_regular_file,
)

__all__ = [
    "AttributionAnalysisConfig",
    "AttributionCacheConfig",
    "AttributionController",
    "AttributionControllerConfig",
    "AttributionCredentialsConfig",
    "AttributionPostprocessingConfig",
]

logger = logging.getLogger("nvrx")

AGENT_CONFIG_VARIABLE = "NVRX_ATTRSVC_RESTART_AGENT_CONFIG"
_BACKENDS = ("lib", "mcp")
_PROGRESSIVE = ("off", "all_explicit")
_CACHE_BYTES = 256 << 20
_DEGRADED = 0.2
_FAILING = 0.5
_ENOUGH = 5


@dataclass(frozen=True)
class AttributionAnalysisConfig:
    """Settings of the analysis of logs.

    Attributes:
        backend: `lib`: results are `restart_agent_response.v1`; `mcp`: the items of old.
        compute_timeout: Seconds from the end of a job to its result. Default 300.
        times: Wait times for growing logs. Default: `SessionTimes()`.
        max_growing: Logs of running jobs that are read at the same time. Default 64.
        model: Model that refines each verdict; None: as `refine.service_model_settings` says,
            with the routes of `restart_agent`.
        restart_agent: Retries, and models; None: that in the file of
            NVRX_ATTRSVC_RESTART_AGENT_CONFIG, if it is set.
    """

    backend: str = "lib"
    compute_timeout: float = DEFAULT_COMPUTE_TIMEOUT_SECONDS
    times: SessionTimes = field(default_factory=SessionTimes)
    max_growing: int = 64
    model: ModelSettings | None = None
    restart_agent: RestartAgentConfig | None = None


@dataclass(frozen=True)
class AttributionCacheConfig:
    """Settings of stored results.

    Attributes:
        cache_file: File that keeps results over a restart of the service; None: no such file.
        grace_period_seconds: Seconds in which a result is used without checking the file. Default
            600.
        max_results: Maximum number of results; the oldest are removed first. Default 3000.
        state_dir: Private directory of journal and history; None: both in memory only.
    """

    cache_file: str | None = None
    grace_period_seconds: float = 600.0
    max_results: int = 3000
    state_dir: str | None = None


@dataclass(frozen=True)
class AttributionPostprocessingConfig:
    """Destinations of verdicts; None and empty: none.

    Attributes:
        export_url: Complete http(s) address that takes records.
        cluster_name: Its name in the records.
        slack_bot_token: Token of the bot that reports STOP.
        slack_channel: Channel of these messages.
    """

    export_url: str | None = None
    cluster_name: str = ""
    slack_bot_token: str = ""
    slack_channel: str = ""


@dataclass(frozen=True)
class AttributionCredentialsConfig:
    """Requirements on the credentials of a model endpoint.

    Args:
        require_llm_api_key: Refuse to start without a key. Default False.
    """

    require_llm_api_key: bool = False


@dataclass(frozen=True)
class AttributionControllerConfig:
    """All settings.

    Attributes:
        allowed_root: Absolute path; nothing outside of it is read.
        analysis: How logs are analysed.
        cache: What is kept.
        postprocessing: Where verdicts are sent to.
        progressive: `all_explicit`: logs are read while they grow when a client asks for it;
            `off`: only after their end.
        credentials: Keys.
    """

    allowed_root: str
    analysis: AttributionAnalysisConfig = AttributionAnalysisConfig()
    cache: AttributionCacheConfig = AttributionCacheConfig()
    postprocessing: AttributionPostprocessingConfig = AttributionPostprocessingConfig()
    progressive: str = "all_explicit"
    credentials: AttributionCredentialsConfig = field(default_factory=AttributionCredentialsConfig)


class AttributionController:
    """Run an analyzer with storage, exports and health of a service; for one event loop.

    Args:
        config: The settings.

    Raises:
        ConfigError: A setting is wrong, or a key is required and missing.
        OSError: The state directory cannot be used.

    Example:
        >>> import asyncio, tempfile
        >>> async def action(root: str) -> str:
        ...     controller = AttributionController(AttributionControllerConfig(root))
        ...     log = os.path.join(root, "job.log")
        ...     with open(log, "w") as file:
        ...         _ = file.write("RuntimeError: CUDA error: out of memory")
        ...     await controller.submit_log(log, analysis_intent="terminal", log_complete=True)
        ...     result = await controller.analyze_log(log)
        ...     await controller.shutdown_async()
        ...     return result.recommendation["action"]
        >>> with tempfile.TemporaryDirectory() as root:
        ...     asyncio.run(action(root))
        'STOP'
    """

    def __init__(self, config: AttributionControllerConfig) -> None:
        _require(config.analysis.backend, _BACKENDS, "analysis backend")
        _require(config.progressive, _PROGRESSIVE, "progressive mode")
        if config.credentials.require_llm_api_key and not load_llm_api_key():
            raise ConfigError(llm_api_key_missing_message())
        self.config = config
        agent = config.analysis.restart_agent
        path = os.environ.get(AGENT_CONFIG_VARIABLE)
        if agent is None and path:
            agent = load_restart_agent_config(path)
        model = config.analysis.model
        if model is None:
            model = service_model_settings(os.environ, None if agent is None else agent.routes)
        self._posters = _posters(config.postprocessing)
        state = config.cache.state_dir
        if state is not None:
            private_dir(state)
        cache = config.cache
        self.analyzer = Analyzer(
            config.allowed_root,
            config.analysis.backend == "lib",
            _refiner(model),
            compute_timeout=config.analysis.compute_timeout,
            coalescer=RequestCoalescer(
                config.analysis.compute_timeout, cache.grace_period_seconds, cache.max_results
            ),
            times=config.analysis.times,
            history=JobHistory(None if state is None else os.path.join(state, "history.jsonl")),
            journal=None
            if state is None
            else SubmissionJournal(os.path.join(state, "journal.jsonl")),
            max_growing=config.analysis.max_growing if config.progressive != "off" else 0,
            policy=None if agent is None else agent.policy,
            on_complete=self._completed,
        )

    async def start(self) -> None:
        """Load stored results, and continue the work of a killed service."""
        self.load_cache()
        count = await self.analyzer.resume()
        if count:
            logger.info("%d submissions of the journal are taken up", count)

    async def submit_log(self, log_path: str, **fields: Any) -> LogAnalyzerSubmitResult:
        """Accept a log.

        Args:
            log_path: Absolute path; the file may be created later, its directory must exist.
            fields: The other arguments of `Analyzer.submit`, by name. With progressive analysis
                switched off a log is read when its job has ended, whatever the intent.

        Raises:
            LogAnalyzerError: See `Analyzer.submit`.
        """
        return await self.analyzer.submit(log_path, **fields)

    async def analyze_log(
        self,
        log_path: str,
        *,
        file: str | None = None,
        wl_restart: int | None = None,
        wait: bool = True,
    ) -> LogAnalysisCycleResult | LogAnalysisSplitlogResult:
        """Return the result for a submitted log; errors as for `Analyzer.analyze`.

        Args:
            log_path: The path as it was submitted.
            file: Name of one file of a split log; None: as `wl_restart` says.
            wl_restart: Index of the file, from 0; None: the newest.
            wait: Return only when the analysis has ended. Default True.
        """
        return await self.analyzer.analyze(log_path, file, wl_restart, wait)

    def read_file_preview(self, log_path: str) -> LogAnalyzerFilePreview:
        """Return the first 4 KiB of a log; errors as for `Analyzer.read_file_preview`.

        Args:
            log_path: Absolute path of the log, below the allowed root.
        """
        return self.analyzer.read_file_preview(log_path)

    def get_stats(self) -> dict[str, Any]:
        """Return counts."""
        return self.analyzer.get_stats()

    def get_cache(self) -> dict[str, Any]:
        """Return the paths of logs with a stored result."""
        return asdict(self.analyzer.coalescer.get_cache())

    def get_inflight(self) -> dict[str, Any]:
        """Return the paths of logs that are being analysed."""
        return asdict(self.analyzer.coalescer.get_inflight())

    def get_submitted(self) -> dict[str, Any]:
        """Return the paths of logs without a result."""
        return asdict(self.analyzer.coalescer.get_submitted())

    def get_all_jobs(self) -> list[dict[str, Any]]:
        """Return each log with its state."""
        return self.analyzer.get_all_jobs()

    def status(self) -> dict[str, Any]:
        """Return `{"status": ok|degraded|fail, "issues": [...]}` with counts.

        From five analyses on, a fifth that fail is `degraded`, and half of them is `fail`.
        """
        stats = self.get_stats()
        done = stats["misses"]
        bad = stats["failures"] + stats["timeouts"]
        share = bad / done if done >= _ENOUGH else 0.0
        issues = [f"{bad} of {done} analyses failed"] if share >= _DEGRADED else []
        if not os.path.isdir(self.analyzer.allowed_root):
            issues.append(f"the allowed root {self.analyzer.allowed_root} is not there")
            share = max(share, _DEGRADED)
        if self.analyzer.journal_problem:
            issues.append(self.analyzer.journal_problem)
            share = max(share, _DEGRADED)
        word = "fail" if share >= _FAILING else "degraded" if share >= _DEGRADED else "ok"
        return {"status": word, "issues": issues, "stats": stats}

    def save_cache(self) -> None:
        """Write the kept results to their file, if there is one.

        Raises:
            OSError: It cannot be written.
        """
        if self.config.cache.cache_file is not None:
            data = json.dumps(self.analyzer.coalescer.export_cache()).encode()
            atomic_write(self.config.cache.cache_file, data)

    def load_cache(self) -> int:
        """Read kept results from their file, and return how many; a damaged file is none."""
        path = self.config.cache.cache_file
        if path is None or not os.path.exists(path):
            return 0
        try:
            data = json.loads(read_regular_file(path, _CACHE_BYTES))
            return self.analyzer.coalescer.import_cache(data)
        except (OSError, ValueError, AttributeError) as error:
            logger.warning("the kept results in %s cannot be read: %s", path, error)
            return 0

    async def shutdown_async(self) -> None:
        """Stop all work and save the stored results."""
        await self.analyzer.shutdown_async()
        self._close()

    def shutdown(self) -> None:
        """Do the same where no event loop runs any more."""
        self.analyzer.shutdown()
        self._close()

    def _close(self) -> None:
        for poster in self._posters:
            poster.close()
        try:
            self.save_cache()
        except OSError as error:
            logger.warning("the results are not kept for the next start: %s", error)

    def _completed(self, done: CompletedAnalysis) -> None:
        """Hand the record of an analysis to all posters; none of them waits."""
        advice = done.payload["recommendation"]
        for poster in self._posters:
            post_analysis_items(
                poster,
                [done.verdict.to_item()],
                log_path=done.job.path,
                cluster=self.config.postprocessing.cluster_name,
                user=done.job.user,
                job_id=done.job.job_id or "",
                duration_s=done.duration_s,
                recommendation=AttributionRecommendation(**advice),
                fr_dump_path=done.payload["fr_dump_path"],
                fr_result=done.fr_result,
            )


def _refiner(
    settings: ModelSettings | None,
) -> Callable[[engine.Verdict], Awaitable[engine.Verdict]] | None:
    if settings is None:
        return None
    try:
        client = ModelClient(settings)
    except MissingExtraError as error:
        # A launcher that passes a model on must not lose the verdicts of the rules by it.
        logger.error("no model is asked: %s", error)  # noqa: TRY400 - one line says all
        return None

    async def ask(verdict: engine.Verdict) -> engine.Verdict:
        return await refine(verdict, client=client)

    return ask


def _posters(config: AttributionPostprocessingConfig) -> list[ResultPoster]:
    found = []
    if config.export_url:
        found.append(ResultPoster(HttpPoster(config.export_url)))
    if config.slack_bot_token and config.slack_channel:

        def tell(record: dict[str, Any]) -> None:
            if should_notify_slack(record["s_recommendation_action"]):
                text = format_slack_text(record)
                post_slack_message(config.slack_bot_token, config.slack_channel, text)

        found.append(ResultPoster(tell))
    return found


def _require(value: str, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{what} {value!r}: must be one of {', '.join(allowed)}")
