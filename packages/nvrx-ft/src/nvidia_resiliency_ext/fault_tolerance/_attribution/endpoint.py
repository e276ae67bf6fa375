# SPDX-License-Identifier: Apache-2.0
"""Where the attribution service is: what an endpoint may look like. Pure."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

__all__ = [
    "DEFAULT_ATTRIBUTION_PORT",
    "MANAGED",
    "check_export_url",
    "client_endpoint",
    "is_managed",
    "is_served",
]

DEFAULT_ATTRIBUTION_PORT = 50050
MANAGED = "localhost"
MANAGED_HOST = "127.0.0.1"

_FLAG = "--ft-attribution-endpoint"
_FORMS = "localhost, http://HOST:PORT, https://HOST:PORT or unix:///PATH"
_BIND_ALL = frozenset({"0.0.0.0", "::", "*", "[::]", ""})  # noqa: S104 - refused here


def is_managed(endpoint: str) -> bool:
    """Return whether the store host runs the service itself."""
    return endpoint == MANAGED


def is_served(endpoint: str) -> bool:
    """Return whether any service speaks this way; `grpc://` is taken for older scripts only."""
    return not endpoint.startswith("grpc://")


def client_endpoint(endpoint: str) -> str:
    """Return the address that the client asks.

    Raises:
        ValueError: It is no address of a service.
    """
    if is_managed(endpoint):
        return f"http://{MANAGED_HOST}:{DEFAULT_ATTRIBUTION_PORT}"
    if "://" not in endpoint:
        raise ValueError(f"{_FLAG} {endpoint!r}: is not {_FORMS}")
    parts, port = _split(endpoint, _FLAG)
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/") or parts.path == "/":
            raise ValueError(f"{_FLAG} {endpoint!r}: a socket is written unix:///PATH")
        return endpoint
    if parts.scheme not in ("http", "https", "grpc"):
        raise ValueError(f"{_FLAG} {endpoint!r}: is not {_FORMS}")
    host = parts.hostname or ""
    if host in _BIND_ALL:
        what = "is no host" if not host else "listens everywhere, but is nobody's address"
        raise ValueError(f"{_FLAG} {endpoint!r}: {host!r} {what}; name the host")
    if port is None:
        raise ValueError(f"{_FLAG} {endpoint!r}: the port is missing")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{_FLAG} {endpoint!r}: only scheme, host, port and path are taken")
    return endpoint


def check_export_url(url: str) -> None:
    """Refuse what results cannot be sent to.

    Raises:
        ValueError: It is no plain http or https address.
    """
    flag = "--ft-attribution-export-url"
    parts, _ = _split(url, flag)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{flag} {url!r}: is no http or https address")
    if parts.query or parts.fragment:
        raise ValueError(f"{flag} {url!r}: a query or a fragment has no place in it")


def _split(text: str, flag: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{flag} {text!r}: {error}") from None
    return parts, port
