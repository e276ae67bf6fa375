# SPDX-License-Identifier: Apache-2.0
"""The errors of nvrx-straggler; each message says what happened and what to do."""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.errors import NvrxError


class StragglerError(NvrxError):
    """Base of the errors of this package."""


class AlreadyInitializedError(StragglerError, AssertionError, RuntimeError):
    """`Detector.initialize` was called twice without `Detector.shutdown` between the calls."""


class NotInitializedError(StragglerError, AssertionError, RuntimeError):
    """The detector was used before `Detector.initialize` or after `Detector.shutdown`."""


class OptionsDifferError(StragglerError, RuntimeError):
    """Ranks were initialised with different options, so they cannot report together."""


class CuptiUnavailableError(StragglerError, RuntimeError):
    """GPU kernels cannot be timed in this process, and `cuda_profiling="require"` was given."""


class MalformedNamesError(StragglerError, ValueError):
    """Names that another rank sent cannot be read; no rank has taken any of them."""


class ControlError(StragglerError, RuntimeError):
    """A running job cannot be reached through its control socket, or refused a change."""
