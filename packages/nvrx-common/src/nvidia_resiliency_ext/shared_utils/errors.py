# SPDX-License-Identifier: Apache-2.0
"""The error tree of nvrx-common; it holds no behaviour beyond fields and messages."""

from __future__ import annotations

__all__ = [
    "ChildStartError", "ConfigError", "DeadlineExceededError", "DirectoryBusyError",
    "FrameTooLargeError", "LogFunnelClosedError", "LogTargetRefusedError", "MalformedFrameError",
    "MissingExtraError", "NvrxError", "PathOutsideRootsError", "PeerClosedError",
    "PeerRefusedError", "UnknownMessageError", "UnsafePathError", "WireError",
]  # fmt: skip


class NvrxError(Exception):
    """Base of every error that the nvrx packages raise on purpose."""


class ConfigError(NvrxError, ValueError):
    """A setting is wrong; the message names the key, the value and what is allowed.

    Example:
        >>> issubclass(ConfigError, ValueError)
        True
    """


class DirectoryBusyError(NvrxError, RuntimeError):
    """A directory allows one user at a time, and another process, or this one, uses it."""


class WireError(NvrxError):
    """A message to or from a peer does not belong to the protocol."""


class MalformedFrameError(WireError):
    """The bytes are not a message: not JSON, wrong structure, unknown or missing field."""


class FrameTooLargeError(WireError):
    """A frame of `size_bytes` is larger than the protocol's `limit_bytes`."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(size_bytes, limit_bytes)
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        return f"a frame of {self.size_bytes} bytes is over the limit of {self.limit_bytes}"


class UnknownMessageError(WireError):
    """Type `name` (cut to 200 characters) is not in the closed set of this connection."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name[:200]

    def __str__(self) -> str:
        return f"type {self.name!r} is not in the message set of this connection"


class PeerClosedError(WireError, ConnectionError):
    """The peer closed the connection before a complete message was received or sent."""


class PeerRefusedError(NvrxError, PermissionError):
    """The process `pid` at the other end runs as user `uid`, not as `own_uid`."""

    def __init__(self, pid: int, uid: int, own_uid: int) -> None:
        super().__init__(pid, uid, own_uid)
        self.pid = pid
        self.uid = uid
        self.own_uid = own_uid

    def __str__(self) -> str:
        return f"peer process {self.pid} runs as uid {self.uid}, expected uid {self.own_uid}"


class DeadlineExceededError(NvrxError, TimeoutError):
    """An operation did not end within its timeout."""


class UnsafePathError(NvrxError, OSError):
    """A path cannot be trusted: a symbolic link, a foreign owner or open permissions.

    It is built like an `OSError`: `UnsafePathError(errno, message, path)`.
    """


class PathOutsideRootsError(UnsafePathError, ValueError):
    """A path is outside of its allowed roots."""


class ChildStartError(NvrxError):
    """The child process `argv` could not be started; `reason` is the message of the system."""

    def __init__(self, argv: tuple[str, ...], reason: str) -> None:
        super().__init__(argv, reason)
        self.argv = argv
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot start {' '.join(self.argv)[:500]!r}: {self.reason}"


class MissingExtraError(NvrxError, ImportError):
    """`what` needs a package that only `extra` installs; `reason` is the message of the import."""

    def __init__(self, what: str, extra: str, reason: object) -> None:
        super().__init__(what, extra, reason)
        self.what = what
        self.extra = extra
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.what} needs more packages ({self.reason}); run: pip install {self.extra}"


class LogFunnelClosedError(NvrxError):
    """A log funnel client or target accepts no more lines: it is closed, or used after a fork."""


class LogTargetRefusedError(NvrxError):
    """The log server refuses to write file `path`; `reason` is its message."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"the log server refuses {self.path!r}: {self.reason}"
