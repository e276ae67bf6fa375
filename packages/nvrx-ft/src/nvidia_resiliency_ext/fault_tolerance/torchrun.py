# SPDX-License-Identifier: Apache-2.0
"""What torch finds by the entry point group `torchrun.handlers`: `torchrun --rdzv-backend=nvrx`.

A file of its own because every torchrun of an environment loads it, whatever its backend is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

__all__ = ["get_handler_creator"]


def get_handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes the handler of a `torchrun --rdzv-backend=nvrx`; always the same."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from ._torchrun_handler import create_torchrun_handler

    return create_torchrun_handler(params)
