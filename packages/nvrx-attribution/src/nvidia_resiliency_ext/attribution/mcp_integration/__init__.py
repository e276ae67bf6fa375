# SPDX-License-Identifier: Apache-2.0
"""The analyses as tools of an MCP server, and the client that calls them."""

from __future__ import annotations

from nvidia_resiliency_ext.attribution.mcp_integration.mcp_client import (
    MultiServerClient,
    NVRxMCPClient,
    create_mcp_client,
    get_server_command,
    is_mcp_connection_error,
    run_distributed_attribution,
)
from nvidia_resiliency_ext.attribution.mcp_integration.module_definitions import (
    create_args_from_dict,
    register_all_modules,
)
from nvidia_resiliency_ext.attribution.mcp_integration.registry import (
    AttributionModuleRegistry,
    ModuleMetadata,
    deserialize_result,
    global_registry,
    serialize_result,
)

__all__ = [
    "AttributionModuleRegistry",
    "ModuleMetadata",
    "MultiServerClient",
    "NVRxMCPClient",
    "create_args_from_dict",
    "create_mcp_client",
    "deserialize_result",
    "get_server_command",
    "global_registry",
    "is_mcp_connection_error",
    "register_all_modules",
    "run_distributed_attribution",
    "serialize_result",
]
