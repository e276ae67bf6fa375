# SPDX-License-Identifier: Apache-2.0
"""The NVLink domain of this node, asked of `nvidia-smi`; only jobs with segments need it."""

from __future__ import annotations

import contextlib
import functools
import re
import resource
import subprocess
import tempfile
from typing import Final

from nvidia_resiliency_ext.shared_utils.children import ExitStatus, start_child
from nvidia_resiliency_ext.shared_utils.errors import ChildStartError, NvrxError

_COMMAND: Final = ("nvidia-smi", "-q")
_MOST_BYTES: Final = 16 << 20  # A node of eight GPUs prints about 0.2 MB.
_LINE: Final = re.compile(r"^\s*ClusterUUID\s*:\s*(\S+)\s*$", re.MULTILINE)
_UUID: Final = re.compile(r"[0-9A-Fa-f][0-9A-Fa-f-]{0,63}")
_REMEDY: Final = "check the fabric with `nvidia-smi -q`, or start without --ft-segment"


class NvlinkDomainError(NvrxError, RuntimeError):
    """This node's NVLink domain cannot be had; the message says why and what to do."""


def nvlink_domain(timeout_s: float = 60.0) -> str:
    """Return the domain of this node's GPUs. Slow while the driver is not loaded.

    Raises NvlinkDomainError: there is none, or `nvidia-smi` is missing, fails or does not end.
    """
    try:
        status, output = _ask(timeout_s)
    except (ChildStartError, OSError) as error:
        raise NvlinkDomainError(
            f"segments need this node's NVLink domain, but nvidia-smi cannot be run: {error};"
            " install the driver's tools, or start without --ft-segment"
        ) from error
    if status is None:
        raise NvlinkDomainError(f"nvidia-smi -q came to no end within {timeout_s:g} s: {_REMEDY}")
    if status.code != 0:
        raise NvlinkDomainError(f"nvidia-smi -q ended with {status.describe()}: {_REMEDY}")
    return parse_domain(output.decode(errors="replace"))


def _ask(timeout_s: float) -> tuple[ExitStatus | None, bytes]:
    """Run `nvidia-smi`; return its exit status, None after `timeout_s`, and its output."""
    # A file and not a pipe: nobody has to read while it runs.
    with tempfile.TemporaryFile() as output:
        with start_child(
            _COMMAND, stdin=subprocess.DEVNULL, stdout=output.fileno(), stderr=subprocess.DEVNULL
        ) as child:
            # Beyond it the kernel ends it by SIGXFSZ: a report without end must not fill the disk.
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (_MOST_BYTES, _MOST_BYTES))
            status = child.wait(timeout_s)
        output.seek(0)
        return status, output.read(_MOST_BYTES)


own_domain = functools.cache(nvlink_domain)  # A node's domain does not change.


def parse_domain(report: str) -> str:
    """Return the one ClusterUUID in the output of `nvidia-smi -q`. Raises NvlinkDomainError."""
    found: list[str] = _LINE.findall(report)
    # GPUs outside any fabric show `N/A`, or zeros, which all such nodes have in common.
    domains = sorted({text.lower() for text in found if _UUID.fullmatch(text) and text.strip("0-")})
    if not domains:
        seen = ", ".join(sorted(set(found))[:4])[:200]
        raise NvlinkDomainError(
            "nvidia-smi -q shows no ClusterUUID of an NVLink domain"
            + (f" (only {seen})" if seen else "")
            + f": {_REMEDY}"
        )
    if len(domains) > 1:
        raise NvlinkDomainError(
            f"the GPUs of this node are in several NVLink domains ({', '.join(domains[:4])}):"
            f" {_REMEDY}"
        )
    return domains[0]
