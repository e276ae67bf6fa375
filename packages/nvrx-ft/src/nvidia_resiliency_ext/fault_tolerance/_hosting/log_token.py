# SPDX-License-Identifier: Apache-2.0
"""What a job's log servers ask for: a token in a file of the user's, or one that the host makes.

The host says in the store what holds, so that no node sends lines to a server that is not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write

__all__ = ["IN_A_FILE", "NO_SERVER", "TokenFile", "make_token", "token_file", "write_token"]

# Said in place of a token, which is hexadecimal.
NO_SERVER = "none"
IN_A_FILE = "in a file"
_NAME = "log_token"
_TOKEN_BYTES = 32


class TokenFile(NamedTuple):
    """Where the token is, and whether the user has put it there."""

    path: str
    is_given: bool


def token_file(environ: Mapping[str, str], job_token_file: str | None, run_dir: str) -> TokenFile:
    """Return the file with the token of the log servers, which may be one that is still to come."""
    given = environ.get(_env.LOG_FUNNEL_TOKEN_FILE) or job_token_file
    return TokenFile(given, True) if given else TokenFile(os.path.join(run_dir, _NAME), False)


def make_token(path: str) -> str:
    """Make a token, put it into a file and return it."""
    token = os.urandom(_TOKEN_BYTES).hex()
    write_token(path, token)
    return token


def write_token(path: str, token: str) -> None:
    """Put a token into a file that only we may read."""
    atomic_write(path, token.encode())
