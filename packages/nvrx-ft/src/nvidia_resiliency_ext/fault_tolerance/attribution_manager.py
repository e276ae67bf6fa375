# SPDX-License-Identifier: Apache-2.0
"""Public names of attribution in the launcher."""

from ._config.attribution import (
    ATTRIBUTION_STOP_ACTIONS,
    DEFAULT_ATTRIBUTION_PORT,
    DEFAULT_ATTRIBUTION_STARTUP_TIMEOUT,
    AttributionConfig,
    AttributionEndpoint,
)
from ._hosting.attribution import AttributionManager

__all__ = [
    "ATTRIBUTION_STOP_ACTIONS", "DEFAULT_ATTRIBUTION_PORT", "DEFAULT_ATTRIBUTION_STARTUP_TIMEOUT",
    "AttributionConfig", "AttributionEndpoint", "AttributionManager",
]  # fmt: skip
