# SPDX-License-Identifier: Apache-2.0
"""Owns the error of the rank's side; the monitor's side raises none at anybody."""

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

__all__ = ["RankMonitorClientError"]


class RankMonitorClientError(NvrxError):
    """A call to the rank's monitor was wrong, or the monitor cannot be had."""
