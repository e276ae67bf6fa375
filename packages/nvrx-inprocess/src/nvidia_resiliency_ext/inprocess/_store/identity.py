# SPDX-License-Identifier: Apache-2.0
"""Whose a store is: the first job that uses it writes its name, another job then stays out."""

from __future__ import annotations

import json
from typing import Any

from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .access import StoreAccess
from .errors import ForeignValueError

_KEY = "nvrx/owner"


class StoreInUseError(NvrxError):
    """The port belongs to another job, or to a program that is no store."""


def claim(store: Any, job: str) -> None:
    """Write the job's name into a store, unless it stands there.

    Raises:
        StoreInUseError: another job's name stands there.
        StoreLostError: it does not answer.
    """
    owner = owner_of(StoreAccess(store).swap(_KEY, "", json.dumps(job)))
    if owner != job:
        raise StoreInUseError(f"it serves job {owner!r}, this is job {job!r}")


def owner_of(text: str) -> str:
    """Return the name that a store holds.

    Raises:
        ForeignValueError: it holds something else there.
    """
    try:
        name = json.loads(text)
    except (ValueError, RecursionError):
        name = None
    if not isinstance(name, str):
        raise ForeignValueError(_KEY, text)
    return name
