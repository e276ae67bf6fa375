# SPDX-License-Identifier: Apache-2.0
"""Take secrets out of text before it leaves a process: keys, tokens, credentials in addresses.

Example:
    >>> redact("GET https://me:pw@host/x WANDB_API_KEY=abcdefgh1234")
    ('GET https://[redacted]@host/x WANDB_API_KEY=[redacted]', 2)
"""

from __future__ import annotations

from nvidia_resiliency_ext.shared_utils._bundle.redact import REDACTED, redact

__all__ = ["REDACTED", "redact"]
