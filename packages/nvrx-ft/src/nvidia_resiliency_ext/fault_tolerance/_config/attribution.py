# SPDX-License-Identifier: Apache-2.0
"""Settings of attribution from flags and configuration, and the forms of an endpoint. Pure."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from nvidia_resiliency_ext.shared_utils.errors import ConfigError

from . import values
from .settings import FaultToleranceConfig

DEFAULT_ATTRIBUTION_PORT = 50050
MANAGED = "localhost"
MANAGED_HOST = "127.0.0.1"
_FLAG = "--ft-attribution-endpoint"
_FORMS = "localhost, http://HOST:PORT, https://HOST:PORT or unix:///PATH"
_BIND_ALL = frozenset({"0.0.0.0", "::", "*"})  # noqa: S104 - refused here


def client_endpoint(endpoint: str) -> str:
    """Return the address that the client asks. Raises ConfigError: it is none of a service."""
    if endpoint == MANAGED:
        return f"http://{MANAGED_HOST}:{DEFAULT_ATTRIBUTION_PORT}"
    parts, port = _split(endpoint, _FLAG)
    problem = ""
    if "://" not in endpoint or parts.scheme not in ("unix", "http", "https", "grpc"):
        problem = f"is not {_FORMS}"
    elif parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/") or parts.path == "/":
            problem = "a socket is written unix:///PATH"
    elif not parts.hostname:
        problem = "'' is no host; name the host"
    elif parts.hostname in _BIND_ALL:
        problem = f"{parts.hostname!r} listens everywhere, but is nobody's address; name the host"
    elif port is None:
        problem = "the port is missing"
    elif parts.username is not None or parts.query or parts.fragment:
        problem = "only scheme, host, port and path are taken"
    if problem:
        raise ConfigError(f"{_FLAG} {endpoint!r}: {problem}")
    return endpoint


def check_export_url(url: str) -> None:
    """Refuse a URL to which results cannot be posted. Raises ConfigError."""
    flag = "--ft-attribution-export-url"
    parts, _ = _split(url, flag)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} {url!r}: is no http or https address")
    if parts.query or parts.fragment:
        raise ConfigError(f"{flag} {url!r}: a query or a fragment has no place in it")


def _split(text: str, flag: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}") from None
    return parts, port


DEFAULT_ATTRIBUTION_STARTUP_TIMEOUT = 20.0
ATTRIBUTION_STOP_ACTIONS = ("log", "no-restart")


@dataclass(frozen=True)
class AttributionEndpoint:
    """An attribution service at `endpoint`, `http://HOST:PORT` or `unix:///PATH`.

    With `enforce_stop` its action STOP ends the job instead of being logged. Default False.
    """

    endpoint: str
    enforce_stop: bool = False


@dataclass(frozen=True)
class AttributionConfig:
    """A launcher's settings for attribution.

    Args:
        endpoint: `localhost`: the rendezvous host runs the service; else its address; None: off.
        applog_dir: The directory of the cycle logs; the service reads nothing else.
        log_file: Where the output of a managed service goes.
        startup_timeout: How long a managed service may take to answer.
        llm_api_key_file: File with the key of the model endpoint.
        llm_base_url: Address of the model endpoint.
        llm_model: Name of the model.
        analysis_backend: Where the analysis runs: lib or mcp.
        stop_action: What STOP leads to: a line in the log, or the end of the job.
        log_level: Level of the service's log.
        export_url: Where a managed service sends its results.

    Raises:
        ValueError: A value is unusable, or two of them contradict each other.
    """

    endpoint: str | None = None
    applog_dir: str | None = None
    log_file: str | None = None
    startup_timeout: float = DEFAULT_ATTRIBUTION_STARTUP_TIMEOUT
    llm_api_key_file: str | None = None
    llm_base_url: str | None = None
    llm_model: str | None = None
    analysis_backend: str | None = None
    stop_action: str = "log"
    log_level: str | None = None
    export_url: str | None = None

    def __post_init__(self) -> None:
        if self.stop_action not in ATTRIBUTION_STOP_ACTIONS:
            raise ConfigError(
                f"--ft-attribution-stop-action {self.stop_action!r}: is not one of"
                f" {', '.join(ATTRIBUTION_STOP_ACTIONS)}"
            )
        if self.export_url is not None:
            check_export_url(self.export_url)
            if not self.is_managed:
                raise ConfigError(
                    "--ft-attribution-export-url needs --ft-attribution-endpoint localhost: a"
                    " service that somebody else runs has settings of its own"
                )
        if self.endpoint is not None:
            client_endpoint(self.endpoint)

    @property
    def is_enabled(self) -> bool:
        return self.endpoint is not None

    @property
    def is_managed(self) -> bool:
        """Whether the rendezvous host runs the service."""
        return self.endpoint == MANAGED

    @property
    def enforce_stop(self) -> bool:
        """Whether STOP ends the job."""
        return self.stop_action == "no-restart"

    @property
    def client_endpoint(self) -> AttributionEndpoint | None:
        """The service, and whether its STOP ends the job; None if attribution is off."""
        if self.endpoint is None:
            return None
        return AttributionEndpoint(client_endpoint(self.endpoint), self.enforce_stop)

    @classmethod
    def from_args(
        cls, args: argparse.Namespace, base_log_file: str | None, ft_cfg: FaultToleranceConfig
    ) -> AttributionConfig:
        """Return the settings of `args`, from `parse_args`, and of `ft_cfg`; those of `args` win.

        `base_log_file` is `--ft-per-cycle-applog-prefix`.

        Raises:
            ValueError: A value is unusable, or something that it needs is missing.
        """

        def flag(name: str) -> Any:
            return getattr(args, f"ft_attribution_{name}", None)

        def option(name: str) -> Any:
            given = flag(name)
            if given is None:
                return getattr(ft_cfg, f"attribution_{name}")
            return None if values.is_none(given) else given

        endpoint = option("endpoint")
        if endpoint is not None and not base_log_file:
            raise ConfigError(
                "--ft-attribution-endpoint needs --ft-per-cycle-applog-prefix: the service reads"
                " cycle logs"
            )
        timeout = flag("startup_timeout")
        of_service = ("llm_api_key_file", "llm_base_url", "llm_model", "analysis_backend")
        config = cls(
            endpoint=endpoint,
            applog_dir=os.path.dirname(base_log_file) if base_log_file else None,
            log_file=_service_log(getattr(args, "ft_nvrx_logfile", None), base_log_file),
            startup_timeout=DEFAULT_ATTRIBUTION_STARTUP_TIMEOUT if timeout is None else timeout,
            stop_action=option("stop_action") or "log",
            export_url=option("export_url"),
            **{name: flag(name) for name in (*of_service, "log_level")},
        )
        if config.is_managed:
            _check_port(args)
        return config


def _service_log(nvrx_logfile: str | None, base_log_file: str | None) -> str | None:
    """Return the log of a managed service, beside the launchers' or below the cycle logs."""
    if nvrx_logfile:
        return f"{os.path.splitext(nvrx_logfile)[0]}_attribution.log"
    if not base_log_file:
        return None
    directory, name = os.path.split(base_log_file)
    return os.path.join(directory, "nvrx", f"{os.path.splitext(name)[0]}_attribution.log")


def _check_port(args: argparse.Namespace) -> None:
    if not any(getattr(args, name, None) for name in ("ft_enable_log_server", "ft_nvrx_logfile")):
        return
    from .launch_config import LogFunnelPorts

    ports = LogFunnelPorts.from_launcher_args(args).listen_ports()
    if DEFAULT_ATTRIBUTION_PORT in ports:
        raise ConfigError(
            f"--ft-log-server-port {args.ft_log_server_port}: the log servers take ports"
            f" {ports[0]} to {ports[-1]}, and the attribution service listens on"
            f" {DEFAULT_ATTRIBUTION_PORT}; choose another"
        )
