# SPDX-License-Identifier: Apache-2.0
"""What all launchers of a job must have been started with alike, and where they differ. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .records import ForeignValueError

_HOST = "host"


def write_settings(host: str, settings: Mapping[str, str]) -> str:
    """Return settings, by flag, of the launcher on `host` as one text."""
    return json.dumps({_HOST: host, **settings})


def read_settings(text: str) -> dict[str, str]:
    """Return what `write_settings` wrote.

    Raises:
        ForeignValueError: it is anything else.
    """
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ForeignValueError(f"not settings: {error}") from None
    if not isinstance(settings, dict) or not all(type(v) is str for v in settings.values()):
        raise ForeignValueError("not settings")
    return settings


def differences(own: Mapping[str, str], host: str, theirs: Mapping[str, str]) -> list[str]:
    """Return a sentence for each flag with another value on `host` than where `theirs` are from."""
    other = theirs.get(_HOST, "another host")
    return [
        f"{flag} is {value} on {host} and {theirs[flag]} on {other}"
        for flag, value in sorted(own.items())
        if flag in theirs and theirs[flag] != value
    ]
