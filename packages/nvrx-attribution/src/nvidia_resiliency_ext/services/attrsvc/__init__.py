# SPDX-License-Identifier: Apache-2.0
"""The attribution service over HTTP: clients submit logs and ask whether a restart helps."""

from __future__ import annotations

from nvidia_resiliency_ext.services.attrsvc.app import AttributionHttpAdapter, create_app
from nvidia_resiliency_ext.services.attrsvc.server import main, setup
from nvidia_resiliency_ext.services.attrsvc.settings import (
    ServiceEndpoint,
    Settings,
    parse_service_endpoint,
)

__all__ = [
    "AttributionHttpAdapter",
    "ServiceEndpoint",
    "Settings",
    "create_app",
    "main",
    "parse_service_endpoint",
    "setup",
]
