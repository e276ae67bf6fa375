# SPDX-License-Identifier: Apache-2.0
"""Options that both kinds of checkpoints take from the environment."""

from __future__ import annotations

import os

__all__ = ["verify_option"]


def verify_option(*, default: bool) -> bool:
    """Return whether what is loaded is compared with its checksums.

    Args:
        default: Where `NVRX_CKPT_VERIFY_ON_LOAD` is not set.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    text = os.environ.get("NVRX_CKPT_VERIFY_ON_LOAD", "")
    if text not in ("", "0", "1"):
        raise ValueError(f"NVRX_CKPT_VERIFY_ON_LOAD={text!r}: allowed are 0 and 1")
    return text == "1" if text else default
