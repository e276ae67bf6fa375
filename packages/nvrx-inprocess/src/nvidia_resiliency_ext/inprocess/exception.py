# SPDX-License-Identifier: Apache-2.0
"""The errors of in-process restart, by their effect on the rank.

- `RestartError`: an ordinary error; in the function it makes all ranks restart. Subclasses are
  `HealthCheckError` (a health check failed; after a fault the rank leaves with it), `InternalError`
  (a part of the wrapper failed) and `TimeoutError` (a part, or a callback, did not end
  in time).
- `RestartAbort`, a BaseException: the rank leaves the wrapper at once.

`RankDiscarded`, `FaultCounterExceeded` and barrier errors are in the modules that raise them.
"""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

__all__ = ["HealthCheckError", "InternalError", "RestartAbort", "RestartError", "TimeoutError"]


class RestartError(NvrxError):
    """Base of the errors of in-process restart."""


class RestartAbort(BaseException):
    """Ends the wrapper on this rank at once; the others continue without it."""


class HealthCheckError(RestartError):
    """A health check found this rank unhealthy; the exception of the check is its cause."""


class InternalError(RestartError):
    """A part of the wrapper failed."""


class TimeoutError(RestartError):  # noqa: A001 - the name that users catch
    """Something did not end within the time given to it."""
