# SPDX-License-Identifier: Apache-2.0
"""How many requests a client may make, and how large they may be."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from nvidia_resiliency_ext.shared_utils.errors import ConfigError

__all__ = ["Rate", "RateLimiter", "parse_rate"]

_UNITS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
_MOST_CLIENTS = 4096


@dataclass(frozen=True)
class Rate:
    """A number of requests in a time.

    Args:
        count: Requests, 1 or more.
        seconds: The time in seconds.
    """

    count: int
    seconds: float


def parse_rate(text: str) -> Rate:
    """Return the rate in a text such as `60/minute`.

    Args:
        text: A number of 1 or more, a slash, and second, minute, hour or day.

    Raises:
        ConfigError: The text has another form.
    """
    count, _, unit = text.strip().partition("/")
    if not (count.isascii() and count.isdigit()) or int(count) < 1 or unit not in _UNITS:
        raise ConfigError(f"rate {text!r:.100}: must be COUNT/second, minute, hour or day")
    return Rate(int(count), _UNITS[unit])


class RateLimiter:
    """Count requests per client: each has a store of permits that fills up evenly. Pure.

    Args:
        rate: What one client may do.

    Example:
        >>> limiter = RateLimiter(parse_rate("1/minute"))
        >>> limiter.wait_s("10.0.0.7", now_s=0.0), limiter.wait_s("10.0.0.7", now_s=30.0)
        (0.0, 30.0)
    """

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str, now_s: float) -> float:
        """Take a permit and return 0, or return the seconds until the next permit.

        Args:
            client: Who asks: an address.
            now_s: The monotonic time in seconds.
        """
        left, then_s = self._clients.pop(client, (float(self._rate.count), now_s))
        per_second = self._rate.count / self._rate.seconds
        left = min(float(self._rate.count), left + (now_s - then_s) * per_second)
        is_admitted = left >= 1.0
        self._clients[client] = (left - 1.0 if is_admitted else left, now_s)
        if len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)
        return 0.0 if is_admitted else (1.0 - left) / per_second
