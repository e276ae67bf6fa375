# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group `torchrun.handlers` for `torchrun --rdzv-backend=nvrx`.

A separate file, because every torchrun of an environment loads it, with any backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

__all__ = ["get_handler_creator"]


def get_handler_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that creates the handler of `torchrun --rdzv-backend=nvrx`."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from ._torchrun_handler import create_torchrun_handler

    return create_torchrun_handler(params)
