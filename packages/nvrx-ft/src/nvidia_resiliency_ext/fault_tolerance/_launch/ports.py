# SPDX-License-Identifier: Apache-2.0
"""MASTER_PORT: a port that is ours until rank 0 listens on it."""

from __future__ import annotations

import errno
import socket

from nvidia_resiliency_ext.shared_utils.errors import NvrxError


class PortInUseError(NvrxError):
    """The port that the user fixed is taken."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"--master-port {port}: the port is in use on this host; "
            f"choose another, or leave the flag out for a free one"
        )
        self.port = port


class PortReservation:
    """A bound socket that never listens.

    With SO_REUSEADDR on both sides the store of rank 0 can bind and listen beside it, while the
    kernel gives the port to nobody who asks for "any free port".
    """

    def __init__(self, port: int | None = None) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if port is not None:
                _refuse_listener(port)
            self._socket.bind(("", port or 0))
        except OSError as error:
            self._socket.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES) and port is not None:
                raise PortInUseError(port) from None
            raise
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Give the port back."""
        self._socket.close()


def _refuse_listener(port: int) -> None:
    """Raise EADDRINUSE when somebody listens: a bind with SO_REUSEADDR alone would not tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))
        probe.listen(1)
