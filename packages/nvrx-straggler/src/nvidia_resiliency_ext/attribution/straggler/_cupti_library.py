# SPDX-License-Identifier: Apache-2.0
"""Which libcupti to load; the extension tries the candidates in this order."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

MAJORS = ("13", "12")
"""CUDA versions whose kernel records the extension can read, newest first."""

_WHEEL_FOLDERS = {"12": "cuda_cupti/lib", "13": "cu13/lib"}


def candidates(
    cuda_version: str | None = None, environ: Mapping[str, str] = os.environ
) -> list[tuple[str, bool]]:
    """Return `(path or name, must be loaded already)` for each library to try.

    A path of `NVRX_CUPTI_LIBRARY` is the only candidate. Otherwise: one that the process has
    loaded, the wheel of torch's CUDA version, the loader's path, a toolkit. Only the major version
    that torch uses is considered.

    Args:
        cuda_version: For example `12.8`; default: torch's, and both majors for a CPU-only torch.
        environ: The environment.
    """
    chosen = environ.get("NVRX_CUPTI_LIBRARY")
    if chosen:
        return [(chosen, False)]
    if cuda_version is None:
        import torch

        cuda_version = torch.version.cuda
    majors = [major for major in MAJORS if not cuda_version or cuda_version.split(".")[0] == major]
    found = [(f"libcupti.so.{major}", True) for major in majors]
    for major in majors:
        folders = [os.path.join(root, _WHEEL_FOLDERS[major]) for root in _wheel_roots()]
        paths = [os.path.join(folder, f"libcupti.so.{major}") for folder in folders]
        found += [(path, False) for path in paths if os.path.exists(path)]
    found += [(f"libcupti.so.{major}", False) for major in majors]
    roots = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for root in dict.fromkeys(root for root in roots if root):
        folder = os.path.join(root, "extras", "CUPTI", "lib64")
        paths = [os.path.join(folder, f"libcupti.so.{major}") for major in majors]
        found += [(path, False) for path in paths if os.path.exists(path)]
    return found


def _wheel_roots() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    return list(spec.submodule_search_locations or ()) if spec is not None else []
