# SPDX-License-Identifier: Apache-2.0
"""Owns the check of the GPUs themselves: recovery action, count, memory errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from . import settings, xid
from .check import PeriodicCheck
from .devices import PynvmlMixin, device_label, selected_devices
from .gpu_judge import MIN_DRIVER_MAJOR, GpuReading, driver_major, judge_gpus
from .nvml_errors import NvmlCallError, NvmlError, NvmlUnavailableError
from .nvml_session import session
from .pci_address import normal_bus_id
from .result import Finding, skipped, unhealthy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["GPUHealthCheck"]

_RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
_NUMBER_FIELDS = {
    "ecc_uncorrected": "NVML_FI_DEV_ECC_DBE_VOL_TOTAL",
    "ecc_corrected": "NVML_FI_DEV_ECC_SBE_VOL_TOTAL",
    "remapped_rows_uncorrected": "NVML_FI_DEV_REMAPPED_UNC",
    "remap_pending": "NVML_FI_DEV_REMAPPED_PENDING",
    "remap_failure": "NVML_FI_DEV_REMAPPED_FAILURE",
}


class GPUHealthCheck(PeriodicCheck, PynvmlMixin):
    """Is every GPU there, and does the driver want nothing done to it?

    Args:
        device_index: Local rank whose GPU is looked at; `None` looks at all of the node.
        interval: Seconds between two looks of `async_check`.
        on_failure: Awaited by `async_check` after an unhealthy look.
        expected_gpus: Fewer visible GPUs are unhealthy; default ``NVRX_EXPECTED_GPUS``. It only
            matters when the whole node is looked at.
        kmsg: Where the kernel's messages are read.
    """

    name = "gpu"

    def __init__(
        self,
        device_index: int | None = None,
        interval: float = 60,
        on_failure: Callable[[], Awaitable[object]] | None = None,
        *,
        expected_gpus: int | None = None,
        kmsg: str = xid.KMSG,
    ) -> None:
        super().__init__(interval, on_failure)
        self.device_index = device_index
        self.expected_gpus = settings.expected_gpus() if expected_gpus is None else expected_gpus
        self._kmsg = kmsg
        job_start_s = settings.job_start_s()
        self._since_s = xid.seconds_since_boot(time.time() if job_start_s is None else job_start_s)
        self._enabled: bool | None = None
        # A GPU that was there must not count as one that this node never had.
        self._most_seen = 0

    @property
    def enabled(self) -> bool:
        """Whether there is a driver that can tell what this check asks; asked once."""
        if self._enabled is None:
            try:
                self._enabled = self._why_disabled() is None
            except NvmlUnavailableError:
                self._enabled = False
            except NvmlError:
                # A driver that is there and fails is a finding, no reason to look away.
                return True
        return self._enabled

    @property
    def component(self) -> str:
        """What is looked at."""
        return "all GPUs" if self.device_index is None else f"GPU of local rank {self.device_index}"

    def _examine(self) -> Finding:
        expected = self.expected_gpus if self.device_index is None else None
        try:
            reason = self._why_disabled()
            if reason is not None and not expected:
                return skipped(reason)
            readings = self._read_all(is_old=reason is not None)
            if self.device_index is None:
                self._most_seen = max(self._most_seen, len(readings))
                expected = max(expected or 0, self._most_seen)
            finding = judge_gpus(readings, expected)
        except NvmlUnavailableError as error:
            if not expected:
                return skipped(str(error))
            reason = f"no GPU is visible, {expected} are expected: {error}"
            return unhealthy(reason, {"expected_gpus": expected})
        except NvmlError as error:
            return self._with_xids(unhealthy(str(error)))
        return self._with_xids(finding)

    def _why_disabled(self) -> str | None:
        version = session().ask("driver_version")
        major = driver_major(version)
        if major is not None and major < MIN_DRIVER_MAJOR:
            return f"driver {version} is older than {MIN_DRIVER_MAJOR}"
        if session().ask("field_number", _RECOVERY_FIELD) is None:
            return "this binding does not know the recovery action: upgrade nvidia-ml-py"
        return None

    def _read_all(self, *, is_old: bool) -> list[GpuReading]:
        wanted = {} if is_old else {"recovery_action": _RECOVERY_FIELD, **_NUMBER_FIELDS}
        numbers = {name: session().ask("field_number", field) for name, field in wanted.items()}
        known = {name: number for name, number in numbers.items() if number is not None}
        return [_read(device, known) for device in selected_devices(self.device_index)]

    def _with_xids(self, finding: Finding) -> Finding:
        xids = xid.recent_xids(self._since_s, self._kmsg)
        if not xids:
            return finding
        evidence = {**finding.evidence, "xids": xids}
        reason = finding.reason
        if finding.status == "unhealthy":
            seen = sorted({entry["number"] for entry in xids})
            reason += f" (XIDs since the job began: {', '.join(map(str, seen))})"
        return Finding(finding.status, reason, evidence)


def _read(device: int | str, known: dict[str, int]) -> GpuReading:
    label = device_label(device)
    ask = session().ask
    try:
        bus_id = normal_bus_id(ask("bus_id", device))
        values = ask("fields", device, [[number, 0] for number in known.values()]) if known else []
    except NvmlCallError as error:
        return GpuReading(label, error=str(error))
    numbers: dict[str, int] = {}
    problem = None
    for name, (code, value) in zip(known, values, strict=True):
        if code == 0:
            numbers[name] = value
        elif name == "recovery_action" and code not in _UNSUPPORTED:
            problem = f"the recovery action cannot be read: NVML error {code}"
    action: Any = numbers.pop("recovery_action", None)
    return GpuReading(label, action, problem, numbers, bus_id)


_UNSUPPORTED = frozenset(
    {
        NvmlCallError.INVALID_ARGUMENT,
        NvmlCallError.NOT_SUPPORTED,
        NvmlCallError.FUNCTION_NOT_FOUND,
    }
)
