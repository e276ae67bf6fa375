# SPDX-License-Identifier: Apache-2.0
"""Save the data of this rank's flight recorder: the active collectives when the job hung.

torch is imported when something is collected. This module aborts nothing and does not read dumps:
the attribution package evaluates them, and the caller decides when and where to take one.
"""

from __future__ import annotations

import abc
import json
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from .errors import NvrxError
from .os_utils import atomic_write

Check = Callable[[], object]

__all__ = ["NoFlightRecorderError", "TorchFRTraceCollector", "TraceCollector"]

logger = logging.getLogger("nvrx")

# NCCL's recorder, and the one of all other backends (torch 2.8 and later); the first is only in
# builds with CUDA, and gives no JSON in torch 2.4.
_SOURCES = ("_dump_nccl_trace", "_dump_fr_trace")


class NoFlightRecorderError(NvrxError, RuntimeError):
    """This torch has no flight recorder, or there is no torch."""


class TraceCollector(abc.ABC):
    """Saves evidence of this rank in directory `path`, which is that of all ranks."""

    def __init__(self, path: str) -> None:
        self.path = path

    @abc.abstractmethod
    def collect(self) -> object:
        """Take the evidence and save it."""


class TorchFRTraceCollector(TraceCollector):
    """Saves the active collectives of torch's flight recorder as ``_dump_<rank>[.json]``.

    Args:
        path: Directory; it is made when there is something to save.
        json: Save JSON, else the pickle that torch's own tools read.
        checks: Health checks whose results go into the dump, by name; default: GPU and network
            adapter of the local rank. They are made now, as the adapter's compares with its
            counters of that time.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = TorchFRTraceCollector(folder, checks={}).collect()
    """

    def __init__(
        self, path: str, json: bool = True, *, checks: Mapping[str, Check] | None = None
    ) -> None:
        super().__init__(path)
        self.json = json
        self._checks = _default_checks() if checks is None else dict(checks)

    def collect(self) -> str:
        """Take a dump and save it at once; return the path of the file.

        Raises:
            NoFlightRecorderError: This torch has none.
            OSError: It cannot be written.
        """
        return self.save(self.take())

    def take(self) -> dict[str, Any]:
        """Return the recorder's content; quick, for the moment before an abort.

        Raises:
            NoFlightRecorderError: This torch has none.
        """
        try:
            from torch._C import _distributed_c10d as recorder
        except ImportError as error:
            raise NoFlightRecorderError(f"there is no flight recorder: {error}") from error
        found: dict[str, Any] | None = None
        for source in _SOURCES:
            as_json = getattr(recorder, source + "_json", None) if self.json else None
            as_pickle = getattr(recorder, source, None)
            if as_json is not None:
                found = json.loads(as_json(includeCollectives=True, onlyActive=True))
            elif as_pickle is not None:
                data = as_pickle(includeCollectives=True, includeStackTraces=False, onlyActive=True)
                found = pickle.loads(data)  # noqa: S301 - torch made it in this process a moment ago
            if found and found.get("entries"):
                return found
        if found is None:
            raise NoFlightRecorderError("this torch has no flight recorder")
        return found

    def save(self, dump: dict[str, Any]) -> str:
        """Check the devices, write `dump` (from `take`) in any thread; return the path of the file.

        It returns when the file would survive a crash of the host.

        Raises:
            OSError: The file cannot be written.
        """
        results = {name: _result(name, check) for name, check in self._checks.items()}
        dump = {**dump, "health_check_results": results}
        data = json.dumps(dump).encode() if self.json else pickle.dumps(dump)
        os.makedirs(self.path, mode=0o750, exist_ok=True)
        ending = ".json" if self.json else ""
        target = os.path.join(self.path, f"_dump_{_rank()}{ending}")
        atomic_write(target, data, mode=0o640)
        return target


def _default_checks() -> dict[str, Check]:
    try:
        from .health_check import GPUHealthCheck, NicHealthCheck

        local_rank = int(os.environ.get("LOCAL_RANK") or 0)
        gpu = GPUHealthCheck(device_index=local_rank)
        return {"gpu": gpu, "nic": NicHealthCheck(device_index=local_rank)}
    except Exception as error:  # noqa: BLE001 - evidence comes first
        logger.warning("a trace will have no health checks in it: %s", error)
        return {}


def _result(name: str, check: Check) -> dict[str, str]:
    try:
        healthy, output = bool(check()), ""
    except Exception as error:  # noqa: BLE001 - a broken check is a finding, too
        healthy, output = False, repr(error)
    status = "Healthy" if healthy else "Failed"
    return {"status": status, "output": output or f"{name}: {status.lower()}"}


def _rank() -> int:
    try:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank()
    except ImportError:
        logger.debug("the rank of a trace comes from RANK")
    return int(os.environ.get("RANK") or 0)
