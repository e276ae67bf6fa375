# SPDX-License-Identifier: Apache-2.0
"""What both ends of the funnel agree on: names, the largest message, and who may talk to whom."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.shared_utils.credentials import PemFile, TokenFile, is_loopback
from nvidia_resiliency_ext.shared_utils.errors import ConfigError

SERVICE = "nvidia_resiliency_ext.fault_tolerance.LogAggregationService"
MAX_MESSAGE_BYTES = 10 << 20
MAX_PATH_BYTES = 4000
MAX_NAME_BYTES = 230
"""Of the 255 that file systems allow, some are for the name of the ledger beside a log."""

_logger = logging.getLogger("LogAggregationServer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Credentials that a server asks of its clients, and a leaf shows; `None` asks for none.

    What stands in the files when a call or connection begins is what counts.
    """

    token: TokenFile | None = None
    certificate: PemFile | None = None
    key: PemFile | None = None
    authority: PemFile | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--tls-cert and --tls-key belong together")

    @classmethod
    def for_server(cls, host: str, *, insecure: bool = False, **files: str | None) -> Access:
        """Take the token from the file in NVRX_LOG_FUNNEL_TOKEN_FILE, if set.

        Refuse to listen where everybody in the network could write logs, unless it is meant.
        """
        path = os.environ.get("NVRX_LOG_FUNNEL_TOKEN_FILE")
        pems = {name: None if file is None else PemFile(file) for name, file in files.items()}
        access = cls(token=TokenFile(path) if path else None, **pems)
        if access.token is None and access.authority is None and not is_loopback(host):
            if not insecure:
                raise ConfigError(
                    f"listening on {host} needs a token (NVRX_LOG_FUNNEL_TOKEN_FILE), client"
                    " certificates (--tls-ca), or --insecure-no-auth"
                )
            _logger.warning("anybody who reaches %s can write logs here (--insecure-no-auth)", host)
        return access

    def admits(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        if self.token is None:
            return True
        shown = (value for key, value in metadata if key == "authorization")
        return any(self.token.admits(value) for value in shown)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the gRPC metadata, the job's token, of a call to another server of the job."""
        return () if self.token is None else (("authorization", self.token.header()),)

    def server_credentials(self) -> Any | None:
        """Return gRPC's credentials for a server, which reread the files; `None` without TLS."""
        import grpc

        if self.certificate is None or self.key is None:
            return None
        shown: tuple[bytes, bytes, bytes | None] | None = None

        def changed() -> Any | None:
            nonlocal shown
            assert self.certificate is not None
            assert self.key is not None
            now = (self.key.read(), self.certificate.read(), self._authority())
            if now == shown:
                return None
            shown = now
            return grpc.ssl_server_certificate_configuration([now[:2]], now[2])

        return grpc.dynamic_ssl_server_credentials(
            changed(), changed, require_client_authentication=self.authority is not None
        )

    def channel_files(self) -> tuple[bytes, bytes | None, bytes | None] | None:
        """Return authority, key and certificate as they are now; `None` without TLS."""
        authority = self._authority()
        if authority is None:
            return None
        key = None if self.key is None else self.key.read()
        return authority, key, None if self.certificate is None else self.certificate.read()

    def _authority(self) -> bytes | None:
        return None if self.authority is None else self.authority.read()
