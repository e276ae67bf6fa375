# SPDX-License-Identifier: Apache-2.0
"""Restart decisions as requests and responses in JSON, over the engine and the models of a site."""

from __future__ import annotations

from nvidia_resiliency_ext.attribution.restart_agent.config import (
    RestartAgentConfig,
    RestartAgentRequest,
    config_fingerprint,
    load_restart_agent_config,
    parse_restart_agent_config,
)
from nvidia_resiliency_ext.attribution.restart_agent.runtime import (
    AttemptRecordControl,
    RestartAgentRuntime,
    build_restart_agent_runtime,
)

__all__ = [
    "AttemptRecordControl",
    "RestartAgentConfig",
    "RestartAgentRequest",
    "RestartAgentRuntime",
    "build_restart_agent_runtime",
    "config_fingerprint",
    "load_restart_agent_config",
    "parse_restart_agent_config",
]
