# SPDX-License-Identifier: Apache-2.0
"""Settings of the service, from its environment; it opens nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.attribution._live.sessions import SessionTimes
from nvidia_resiliency_ext.attribution.api_keys import load_slack_bot_token
from nvidia_resiliency_ext.attribution.controller import (
    AGENT_CONFIG_VARIABLE,
    AttributionAnalysisConfig,
    AttributionCacheConfig,
    AttributionControllerConfig,
    AttributionPostprocessingConfig,
)
from nvidia_resiliency_ext.attribution.orchestration.config import DEFAULT_COMPUTE_TIMEOUT_SECONDS
from nvidia_resiliency_ext.attribution.postprocessing.post_backend import check_export_url
from nvidia_resiliency_ext.attribution.refine import ModelSettings, service_model_settings
from nvidia_resiliency_ext.attribution.restart_agent.config import (
    RestartAgentConfig,
    load_restart_agent_config,
)
from nvidia_resiliency_ext.services.attrsvc.limits import Rate, parse_rate
from nvidia_resiliency_ext.shared_utils.credentials import is_loopback
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

__all__ = ["ServiceEndpoint", "Settings", "parse_service_endpoint"]

_HIGHEST_PORT = 65535
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True)
class ServiceEndpoint:
    """Where the service listens: a host and port, or the path of a Unix socket.

    Attributes:
        host: Address; empty for a socket.
        port: Port; 0 for a socket.
        path: Path of the socket; None for TCP.
    """

    host: str = ""
    port: int = 0
    path: str | None = None

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        return self.path is not None or is_loopback(self.host)

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def parse_service_endpoint(text: str) -> ServiceEndpoint:
    """Return the endpoint in a text: `http://h:p`, `h:p`, `unix:///path` or `/path`.

    Args:
        text: `http://HOST:PORT`, `HOST:PORT`, `unix:///PATH` or `/PATH`.

    Raises:
        ConfigError: The text has none of these forms.

    Example:
        >>> str(parse_service_endpoint("localhost:8000"))
        'http://localhost:8000'
    """
    given = text.strip()
    if given.startswith(("/", "unix://")):
        path = given.removeprefix("unix://")
        if os.path.isabs(path) and not path.endswith("/"):
            return ServiceEndpoint(path=path)
        raise ConfigError(f"endpoint {text!r}: the socket needs an absolute path")
    bare = given.removeprefix("http://").rstrip("/")
    host, colon, port = bare.rpartition(":")
    host = host.strip("[]")
    is_number = port.isascii() and port.isdigit() and 0 < int(port[:6]) <= _HIGHEST_PORT
    if not colon or not host or not is_number or "/" in host or "@" in host:
        raise ConfigError(f"endpoint {text!r}: must be http://HOST:PORT, HOST:PORT or unix:///PATH")
    return ServiceEndpoint(host, int(port))


@dataclass(frozen=True)
class Settings:
    """All settings; each is the environment variable of the same name after `NVRX_ATTRSVC_`.

    Attributes:
        allowed_root: Absolute path; no log outside of it is read. Required.
        endpoint: Where to listen; wins over `host` and `port`. None: as these say.
        host: Address to listen at. Default 127.0.0.1.
        port: Port to listen at. Default 8000.
        log_level: Level of the service's log.
        compute_timeout: Seconds from the end of a job to its result. Default 300.
        analysis_backend: Form of results: `lib` or `mcp`.
        progressive_analysis: `all_explicit`, or `off`: no log is read before its end.
        progressive_enabled: False is the same as `off`.
        log_quiet_seconds: An ended log is complete when it has not grown for so long. Default 5.
        log_max_wait_seconds: ... or when it still grows after so long. Default 40.
        log_poll_seconds: Between two looks at an ended log. Default 0.25.
        pre_end_poll_seconds: Between two looks at a log of a running job. Default 180.
        active_idle_seconds: A log of a running job that has not grown for so long is let go.
            Default 900.
        max_active_states: Logs of running jobs that are read at the same time. Default 64.
        max_completed_results: Results that are kept. Default 3000.
        cluster_name: Its name in exported records.
        cache_file: File in which results outlive the service; None: there is none.
        cache_grace_period_seconds: Seconds that a result counts without a look at the log. Default
            600.
        state_dir: Private directory of journal and history; None: both in memory only.
        rate_limit_submit: `POST /logs` per client. Default 1200/minute.
        rate_limit_analyze: `GET /logs?wait=true` per client. Default 60/minute.
        rate_limit_preview: `GET /print` per client. Default 120/minute.
        export_url: Complete http(s) address that takes a record of each result; None: none does.
        token_file: File with the token that clients must show; None: none is asked for.
        insecure: Listen at an address that others can reach, without a token. Default False.
        slack_bot_token: Token of the bot that writes of STOP (`SLACK_BOT_TOKEN`).
        slack_channel: Where it writes (`SLACK_CHANNEL`).
        model: The model that is asked (`NVRX_ATTRSVC_LLM_*`, `NVRX_LLM_*`).
        restart_agent: Retries and models of the file `NVRX_ATTRSVC_RESTART_AGENT_CONFIG`.

    Raises:
        ConfigError: A value is wrong; the message names the variable.

    Example:
        >>> Settings.from_environ({"NVRX_ATTRSVC_ALLOWED_ROOT": "/logs"}).port
        8000
    """

    allowed_root: str
    endpoint: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "INFO"
    compute_timeout: float = DEFAULT_COMPUTE_TIMEOUT_SECONDS
    analysis_backend: str = "lib"
    progressive_analysis: str = "all_explicit"
    progressive_enabled: bool = True
    log_quiet_seconds: float = 5.0
    log_max_wait_seconds: float = 40.0
    log_poll_seconds: float = 0.25
    pre_end_poll_seconds: float = 180.0
    active_idle_seconds: float = 900.0
    max_active_states: int = 64
    max_completed_results: int = 3000
    cluster_name: str = ""
    cache_file: str | None = None
    cache_grace_period_seconds: float = 600.0
    state_dir: str | None = None
    rate_limit_submit: str = "1200/minute"
    rate_limit_analyze: str = "60/minute"
    rate_limit_preview: str = "120/minute"
    export_url: str | None = None
    token_file: str | None = None
    insecure: bool = False
    slack_bot_token: str = ""
    slack_channel: str = ""
    model: ModelSettings | None = None
    restart_agent: RestartAgentConfig | None = None

    def __post_init__(self) -> None:
        if not os.path.isabs(self.allowed_root):
            name = "NVRX_ATTRSVC_ALLOWED_ROOT"
            raise ConfigError(f"{name}: must be an absolute path, not {self.allowed_root!r}")
        _one_of(self.analysis_backend, ("lib", "mcp"), "NVRX_ATTRSVC_ANALYSIS_BACKEND")
        progressive = ("off", "all_explicit")
        _one_of(self.progressive_analysis, progressive, "NVRX_ATTRSVC_PROGRESSIVE_ANALYSIS")
        _one_of(self.log_level.upper(), _LEVELS, "NVRX_ATTRSVC_LOG_LEVEL")
        if self.export_url:
            check_export_url(self.export_url)
        for rate in (self.rate_limit_submit, self.rate_limit_analyze, self.rate_limit_preview):
            parse_rate(rate)
        where = self.service_endpoint
        if not where.is_private and self.token_file is None and not self.insecure:
            raise ConfigError(
                f"{where} can be reached by other machines: set NVRX_ATTRSVC_TOKEN_FILE, or"
                " NVRX_ATTRSVC_INSECURE=1 to do without a token"
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Return the settings in an environment.

        Args:
            environ: The environment.

        Raises:
            ConfigError: A value is wrong, or the root is missing.
        """
        given: dict[str, Any] = {}
        for variable, (name, convert) in _VARIABLES.items():
            text = environ.get(variable)
            if text:
                try:
                    given[name] = convert(text)
                except ValueError as error:
                    raise ConfigError(f"{variable}={text!r:.200}: {error}") from None
        if "allowed_root" not in given:
            raise ConfigError("NVRX_ATTRSVC_ALLOWED_ROOT is not set: name the folder of the logs")
        channel = environ.get("SLACK_CHANNEL", "")
        token = load_slack_bot_token() if channel else ""
        file = environ.get(AGENT_CONFIG_VARIABLE)
        agent = given["restart_agent"] = load_restart_agent_config(file) if file else None
        given["model"] = service_model_settings(environ, None if agent is None else agent.routes)
        return cls(**given, slack_bot_token=token, slack_channel=channel)

    @property
    def service_endpoint(self) -> ServiceEndpoint:
        """Where to listen."""
        if self.endpoint is not None:
            return parse_service_endpoint(self.endpoint)
        return ServiceEndpoint(self.host, self.port)

    @property
    def rates(self) -> dict[str, Rate]:
        """Limits of requests per client, by kind."""
        return {
            "submit": parse_rate(self.rate_limit_submit),
            "analyze": parse_rate(self.rate_limit_analyze),
            "preview": parse_rate(self.rate_limit_preview),
        }

    def controller_config(self) -> AttributionControllerConfig:
        """Return the part that has nothing to do with HTTP."""
        times = SessionTimes(
            self.log_quiet_seconds,
            self.log_max_wait_seconds,
            self.log_poll_seconds,
            self.pre_end_poll_seconds,
            self.active_idle_seconds,
        )
        return AttributionControllerConfig(
            self.allowed_root,
            AttributionAnalysisConfig(
                self.analysis_backend,
                self.compute_timeout,
                times,
                self.max_active_states,
                self.model,
                self.restart_agent,
            ),
            AttributionCacheConfig(
                self.cache_file,
                self.cache_grace_period_seconds,
                self.max_completed_results,
                self.state_dir,
            ),
            AttributionPostprocessingConfig(
                self.export_url, self.cluster_name, self.slack_bot_token, self.slack_channel
            ),
            self.progressive_analysis if self.progressive_enabled else "off",
        )


def _one_of(value: str, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{what}={value!r:.200}: must be one of {', '.join(allowed)}")


def _flag(text: str) -> bool:
    value = text.strip().lower()
    if value not in _YES | _NO:
        raise ValueError("must be 1 or 0")
    return value in _YES


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be seconds, 0 or more")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be 1 or more")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 < value <= _HIGHEST_PORT:
        raise ValueError("must be a port, 1 to 65535")
    return value


_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "NVRX_ATTRSVC_ALLOWED_ROOT": ("allowed_root", str),
    "NVRX_ATTRSVC_ENDPOINT": ("endpoint", str),
    "NVRX_ATTRSVC_HOST": ("host", str),
    "NVRX_ATTRSVC_PORT": ("port", _port),
    "NVRX_ATTRSVC_LOG_LEVEL": ("log_level", str),
    "NVRX_ATTRSVC_COMPUTE_TIMEOUT": ("compute_timeout", _seconds),
    "NVRX_ATTRSVC_ANALYSIS_BACKEND": ("analysis_backend", str),
    "NVRX_ATTRSVC_PROGRESSIVE_ANALYSIS": ("progressive_analysis", str),
    "NVRX_ATTRSVC_RESTART_AGENT_PROGRESSIVE_ENABLED": ("progressive_enabled", _flag),
    "NVRX_ATTRSVC_RESTART_AGENT_LOG_QUIET_SECONDS": ("log_quiet_seconds", _seconds),
    "NVRX_ATTRSVC_RESTART_AGENT_LOG_MAX_WAIT_SECONDS": ("log_max_wait_seconds", _seconds),
    "NVRX_ATTRSVC_RESTART_AGENT_LOG_POLL_SECONDS": ("log_poll_seconds", _seconds),
    "NVRX_ATTRSVC_RESTART_AGENT_PRE_END_POLL_SECONDS": ("pre_end_poll_seconds", _seconds),
    "NVRX_ATTRSVC_RESTART_AGENT_ACTIVE_IDLE_SECONDS": ("active_idle_seconds", _seconds),
    "NVRX_ATTRSVC_RESTART_AGENT_MAX_ACTIVE_STATES": ("max_active_states", _count),
    "NVRX_ATTRSVC_RESTART_AGENT_MAX_COMPLETED_RESULTS": ("max_completed_results", _count),
    "NVRX_ATTRSVC_CLUSTER_NAME": ("cluster_name", str),
    "NVRX_ATTRSVC_CACHE_FILE": ("cache_file", str),
    "NVRX_ATTRSVC_CACHE_GRACE_PERIOD_SECONDS": ("cache_grace_period_seconds", _seconds),
    "NVRX_ATTRSVC_STATE_DIR": ("state_dir", str),
    "NVRX_ATTRSVC_RATE_LIMIT_SUBMIT": ("rate_limit_submit", str),
    "NVRX_ATTRSVC_RATE_LIMIT_ANALYZE": ("rate_limit_analyze", str),
    "NVRX_ATTRSVC_RATE_LIMIT_PREVIEW": ("rate_limit_preview", str),
    "NVRX_ATTRSVC_EXPORT_URL": ("export_url", str),
    "NVRX_ATTRSVC_TOKEN_FILE": ("token_file", str),
    "NVRX_ATTRSVC_INSECURE": ("insecure", _flag),
}
