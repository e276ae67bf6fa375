# SPDX-License-Identifier: Apache-2.0
"""`FaultToleranceConfig`, under the path that programs import it from."""

from ._config.settings import FaultToleranceConfig

__all__ = ["FaultToleranceConfig"]
