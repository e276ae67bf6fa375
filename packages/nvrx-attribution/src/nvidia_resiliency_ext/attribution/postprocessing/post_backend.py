# SPDX-License-Identifier: Apache-2.0
"""Send an exported record to the site's collector."""

from __future__ import annotations

import json
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from nvidia_resiliency_ext.shared_utils.errors import ConfigError

__all__ = ["HttpPoster", "check_export_url"]

_TIMEOUT_S = 10.0


def check_export_url(url: str) -> str:
    """Return a usable address of a collector unchanged.

    Args:
        url: `http://HOST/PATH` or `https://HOST/PATH`.

    Raises:
        ConfigError: The address is incomplete, has another scheme, or has a query.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"export address {url!r}: must be http(s)://HOST/PATH without a query")
    return url


class HttpPoster:
    """Post records as JSON.

    Args:
        url: Where to.

    Raises:
        ConfigError: See `check_export_url`.

    Example:
        >>> post = HttpPoster("https://collector.example/records")
        >>> post({"s_job_id": "42"})  # doctest: +SKIP
    """

    def __init__(self, url: str) -> None:
        self._url = check_export_url(url)

    def __call__(self, record: dict[str, Any]) -> None:
        """Send one record.

        Args:
            record: The record, sent as JSON.

        Raises:
            OSError: The collector cannot be reached or refuses it.
        """
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(record).encode(), headers)  # noqa: S310 - checked above
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310 - as above
            return
