# SPDX-License-Identifier: Apache-2.0
"""The errors of in-process restart, by their effect on the rank.

- `RestartError` and its subclasses, ordinary errors: in the function they make all ranks restart.
- `RestartAbort`, a BaseException: the rank leaves the wrapper at once.

`RankDiscarded`, `FaultCounterExceeded` and barrier errors are in the modules that raise them.

Example:
    >>> issubclass(RestartAbort, Exception)  # `except Exception` does not stop it
    False
"""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

__all__ = ["HealthCheckError", "InternalError", "RestartAbort", "RestartError", "TimeoutError"]


class RestartError(NvrxError):
    """Base of the errors of in-process restart."""


class RestartAbort(BaseException):
    """Ends the wrapper on this rank at once; the others continue without it."""


class HealthCheckError(RestartError):
    """A health check failed (see the cause); after a fault the rank leaves the wrapper with it."""


class InternalError(RestartError):
    """A part of the wrapper failed."""


class TimeoutError(RestartError):  # noqa: A001 - the name that users catch
    """A part of the wrapper, or a callback, did not end within the time given to it."""
