# SPDX-License-Identifier: Apache-2.0
"""Write and read manifests: JSON files with length and checksum of all files and tensors.

    .nvrx_manifest.json           of the checkpoint: its `.metadata`, and each rank's manifest
    .nvrx_manifest.<rank>.json    of the files that one rank wrote, and the items in them

Each has the CRC-32 of its own content, so that no bit of a checkpoint is outside of a checksum.
The ranks' manifests are written by the worker processes, and only their checksums travel.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import TYPE_CHECKING, Any

from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

from ._durable import write_small_file
from ._errors import DamagedCheckpointError
from ._write_plan import FileResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._write_plan import WritePlan

FORMAT = 1
MANIFEST = ".nvrx_manifest.json"
METADATA = ".metadata"
_MAX_BYTES = 1 << 30

Manifest = dict[str, Any]


def rank_manifest_name(rank: str) -> str:
    """Return the name of the manifest of a rank's files."""
    return f".nvrx_manifest.{rank}.json"


def write_manifest(path: str, content: Mapping[str, Any], *, sync: bool = True) -> FileResult:
    """Write a manifest, with format, algorithm and its own checksum added.

    Raises:
        CheckpointWriteError: It cannot be written.
    """
    body: Manifest = {"format": FORMAT, "algorithm": "crc32", **content}
    body["crc32"] = zlib.crc32(_canonical(body))
    data = json.dumps(body, indent=0).encode()
    write_small_file(path, data, sync=sync)
    return FileResult(path, len(data), zlib.crc32(data), [])


def write_rank_manifest(plan: WritePlan, results: Sequence[FileResult]) -> FileResult | None:
    """Write the manifest that a plan asks for, if any, once its files are durable.

    Raises:
        CheckpointWriteError: It cannot be written.
    """
    if plan.manifest is None:
        return None
    files = {
        os.path.basename(file.path): {
            "bytes": result.nbytes,
            "crc32": result.crc,
            "items": [
                [item.name, item.start, item.length, crc]
                for item, crc in zip(file.items, result.item_crcs, strict=True)
            ],
        }
        for file, result in zip(plan.files, results, strict=True)
    }
    return write_manifest(plan.manifest, {"files": files}, sync=plan.sync)


def read_manifest(path: str) -> Manifest:
    """Read a manifest and check it against its own checksum.

    Raises:
        DamagedCheckpointError: It is no manifest, or not as it was written.
        OSError: It cannot be read.
    """
    data = read_regular_file(path, max_bytes=_MAX_BYTES)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise DamagedCheckpointError(path, "it is no JSON") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DamagedCheckpointError(path, f"it is no manifest of format {FORMAT}")
    crc = body.pop("crc32", None)
    if zlib.crc32(_canonical(body)) != crc:
        raise DamagedCheckpointError(path, "its own checksum is wrong")
    return body


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
