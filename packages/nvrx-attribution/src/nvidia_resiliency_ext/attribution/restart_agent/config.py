# SPDX-License-Identifier: Apache-2.0
"""Requests and configuration of the restart agent, from JSON; unknown keys are refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nvidia_resiliency_ext.attribution.api_keys import load_llm_api_key
from nvidia_resiliency_ext.attribution.engine import RetryPolicy
from nvidia_resiliency_ext.attribution.refine import ModelSettings, model_values_from_environ
from nvidia_resiliency_ext.shared_utils.errors import ConfigError
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

__all__ = [
    "RestartAgentConfig",
    "RestartAgentRequest",
    "config_fingerprint",
    "load_restart_agent_config",
    "parse_restart_agent_config",
]

REQUEST_SCHEMA = "restart_agent_request.v1"
CONFIG_SCHEMA = "restart_agent_config.v1"
MODES = ("terminal", "progressive_start", "progressive_end")

_LIMIT_BYTES = 1 << 20
_CAPABILITY = {
    "id": "bad_token_retry_then_skip",
    "behavior": "retry_then_skip",
    "applies_to": "bad_token_or_window",
    "entity": "data_position",
    "scope": "root_and_entity",
}
# Section -> key -> (type, default); a type of two or more texts is a choice among them.
_SECTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "enrichment": {"enabled": (bool, True)},
    "routing": {
        "mode": (("collect_all",), "collect_all"),
        "max_parallel_models": (int, 4),
        "timeout_seconds": (float, 240.0),
    },
    "runtime.history": {
        "enabled": (bool, True),
        "max_attempts_per_job": (int, 10),
        "max_total_records": (int, 3000),
    },
    "runtime.l0_source": {
        "read_mode": (("chunked", "single_snapshot"), "chunked"),
        "chunk_size_bytes": (int, 1 << 20),
    },
    "retry_policy": {
        "confirmation_retry_allowed_retries": (int, 1),
        "bounded_retry_allowed_retries": (int, 1),
        "general_retry_allowed_retries": (int, 3),
    },
}
_MODEL = {
    "model": (str, None),
    "base_url": (str, None),
    "temperature": (float, None),
    "top_p": (float, None),
    "max_tokens": (int, None),
    "timeout_seconds": (float, None),
}


@dataclass(frozen=True)
class RestartAgentRequest:
    """Which log is to be evaluated, and when.

    Attributes:
        log_path: Absolute path.
        job_id: The job; without it no history counts.
        cycle_id: Which attempt of it; None: not known.
        analysis_mode: `terminal` (the job has ended), `progressive_start` (it runs: read what is
            there) or `progressive_end` (it has ended: read the rest).

    Raises:
        ConfigError: A value is wrong.
    """

    log_path: str
    job_id: str | None = None
    cycle_id: int | None = None
    analysis_mode: str = "terminal"

    def __post_init__(self) -> None:
        path: object = self.log_path
        if not isinstance(path, str) or not os.path.isabs(path):
            raise ConfigError(f"log_path {self.log_path!r:.200}: must be an absolute path")
        if self.job_id is not None and not isinstance(self.job_id, str):
            raise ConfigError("job_id: must be a text")
        if self.cycle_id is not None and type(self.cycle_id) is not int:
            raise ConfigError("cycle_id: must be a whole number")
        if self.analysis_mode not in MODES:
            modes = ", ".join(MODES)
            raise ConfigError(f"analysis_mode {self.analysis_mode!r:.100}: one of {modes}")

    @classmethod
    def from_payload(cls, payload: object) -> RestartAgentRequest:
        """Return the request in a decoded JSON object `restart_agent_request.v1`.

        Args:
            payload: The decoded object: `log_path`, and optionally `job_id`, `cycle_id`,
                `analysis_mode`.

        Raises:
            ConfigError: The value is no such object; the message names the key.
        """
        allowed = ("log_path", "job_id", "cycle_id", "analysis_mode")
        value = _document(payload, REQUEST_SCHEMA, allowed)
        if "log_path" not in value:
            raise ConfigError("log_path is missing")
        return cls(**value)

    def to_payload(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"schema_version": REQUEST_SCHEMA, **asdict(self)}


@dataclass(frozen=True)
class RestartAgentConfig:
    """How the agent evaluates logs.

    Attributes:
        config_id: Name of the configuration.
        config_version: Its version.
        settings: Each section with all its keys, defaults filled in.
        policy: Retries, with what the workload declares to recover from by itself. Default:
            `RetryPolicy()`.
        routes: Models that are asked, by name; empty: none.
    """

    config_id: str = ""
    config_version: str = ""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    routes: dict[str, ModelSettings] = field(default_factory=dict)


def load_restart_agent_config(path: str | os.PathLike[str]) -> RestartAgentConfig:
    """Return the configuration in a JSON file.

    Args:
        path: The JSON file.

    Raises:
        ConfigError: The file cannot be read or is wrong; the message names file and key.
    """
    name = os.fspath(path)
    try:
        value = json.loads(read_regular_file(name, _LIMIT_BYTES, follows_symlink=True))
        return parse_restart_agent_config(value)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {error}") from None


def parse_restart_agent_config(
    mapping: object, environ: Mapping[str, str] | None = None
) -> RestartAgentConfig:
    """Return the configuration in a decoded JSON object `restart_agent_config.v1`.

    What a route and `model_defaults` leave out is as NVRX_LLM_MODEL, NVRX_LLM_BASE_URL and the
    others say; without routes these are the only one, if they name an address.

    Args:
        mapping: The object.
        environ: Where to look for models; default: the environment of the process.

    Raises:
        ConfigError: A key is unknown, or a value wrong; the message names it.

    Example:
        >>> config = parse_restart_agent_config({"schema_version": "restart_agent_config.v1"}, {})
        >>> config.settings["retry_policy"]["general_retry_allowed_retries"], config.routes
        (3, {})
    """
    roots = {section.partition(".")[0] for section in _SECTIONS}
    others = ("config_id", "config_version", "declared_recovery_capabilities")
    allowed = (*roots, *others, "model_defaults", "model_routes")
    value = _document(mapping, CONFIG_SCHEMA, allowed)
    runtime = value.get("runtime", {})
    _check_keys("runtime", runtime, ("history", "l0_source"))
    settings = {}
    for section, spec in _SECTIONS.items():
        root, _, part = section.partition(".")
        found = value.get(root, {}).get(part, {}) if part else value.get(root, {})
        settings[section] = _checked(section, found, spec)
    retries = settings["retry_policy"]
    general = retries["general_retry_allowed_retries"]
    policy = RetryPolicy(
        general,
        retries["confirmation_retry_allowed_retries"],
        retries["bounded_retry_allowed_retries"],
        _managed_retries(value.get("declared_recovery_capabilities", []), general),
    )
    routes: dict[str, ModelSettings] = {}
    if settings["enrichment"]["enabled"]:
        routes = _routes(value, os.environ if environ is None else environ, settings["routing"])
    names = (value.get("config_id", ""), value.get("config_version", ""))
    if not all(isinstance(name, str) for name in names):
        raise ConfigError("config_id, config_version: must be texts")
    return RestartAgentConfig(*names, settings, policy, routes)


def config_fingerprint(config: RestartAgentConfig) -> str:
    """Return a hash of all settings with an effect, without names, paths and secrets.

    Args:
        config: The configuration.
    """
    routes = [
        {k: v for k, v in asdict(route).items() if k not in {"api_key", "base_url"}}
        for route in config.routes.values()
    ]
    effective = {"settings": config.settings, "policy": asdict(config.policy), "routes": routes}
    text = json.dumps(effective, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _document(value: object, schema: str, allowed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"not an object {schema}")
    if value.get("schema_version") != schema:
        raise ConfigError(f"schema_version {value.get('schema_version')!r:.100}: must be {schema}")
    rest = {key: item for key, item in value.items() if key != "schema_version"}
    _check_keys(schema, rest, allowed)
    return rest


def _check_keys(where: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be an object")
    for key in value:
        if key not in allowed:
            raise ConfigError(f"{where}: unknown key {key!r:.100}")


def _checked(where: str, value: object, spec: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    _check_keys(where, value, tuple(spec))
    assert isinstance(value, Mapping)
    found = {}
    for key, (kind, default) in spec.items():
        item = value.get(key, default)
        if isinstance(kind, tuple):
            is_right = item in kind
        elif kind in (int, float):
            allowed = (int, float) if kind is float else (int,)
            is_right = isinstance(item, allowed) and not isinstance(item, bool) and item >= 0
        else:
            is_right = isinstance(item, kind)
        is_left_out = item is None and key not in value
        if not is_right and not is_left_out:
            raise ConfigError(f"{where}.{key}={item!r:.100}: wrong type or value")
        found[key] = item
    return found


def _managed_retries(capabilities: object, general: int) -> int | None:
    if not isinstance(capabilities, list):
        raise ConfigError("declared_recovery_capabilities: must be a list")
    found = None
    for item in capabilities:
        _check_keys("declared_recovery_capabilities", item, (*_CAPABILITY, "allowed_retries"))
        for key, only in _CAPABILITY.items():
            if item.get(key, only if key != "id" else None) != only:
                raise ConfigError(f"declared_recovery_capabilities: {key} must be {only!r}")
        found = item.get("allowed_retries", 1)
        if type(found) is not int or not 0 <= found <= general:
            text = f"allowed_retries {found!r}: must be at most {general}, the general retries"
            raise ConfigError(f"declared_recovery_capabilities: {text}")
    return found


def _routes(
    value: dict[str, Any], environ: Mapping[str, str], routing: dict[str, Any]
) -> dict[str, ModelSettings]:
    defaults = _checked("model_defaults", value.get("model_defaults", {}), _MODEL)
    given = value.get("model_routes", [])
    if not isinstance(given, list):
        raise ConfigError("model_routes: must be a list")
    usual = model_values_from_environ(environ)
    is_whole = all(defaults[key] or usual.get(key) for key in ("model", "base_url"))
    if not given and (is_whole or "base_url" in usual):
        given = [{"id": "default"}]
    routes = {}
    for item in given:
        own = _checked("model_routes", item, {"id": (str, None), **_MODEL})
        merged = {key: own[key] if own[key] is not None else defaults[key] for key in _MODEL}
        timeout_s = merged.pop("timeout_seconds") or 30.0
        merged = {key: usual.get(key) if item is None else item for key, item in merged.items()}
        kept = {key: item for key, item in merged.items() if item is not None}
        name = own["id"] or kept.get("model", "")
        if name in routes or not {"model", "base_url"} <= set(kept):
            raise ConfigError(
                f"model_routes: {name!r} is there twice, or lacks model or base_url"
                " (NVRX_LLM_MODEL, NVRX_LLM_BASE_URL)"
            )
        routes[name] = ModelSettings(
            **kept,
            api_key=load_llm_api_key(),
            timeout_s=timeout_s,
            deadline_s=routing["timeout_seconds"],
        )
    return routes
