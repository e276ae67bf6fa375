# SPDX-License-Identifier: Apache-2.0
"""The check of GPUs: what the driver wants done to them, with the kernel's messages about errors.

These messages (XIDs) are evidence and never a verdict: many are faults of a program.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from . import check
from .check import Finding
from .devices import DeviceCheck, ask, device_label, selected_devices
from .nvml import UNSUPPORTED, NvmlCallError, NvmlError, NvmlUnavailableError
from .pci import normal_bus_id

KMSG = "/dev/kmsg"

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d{1,5}),? ?(.*)")
_READ_BYTES = 8192
_LIMIT_BYTES = 16 << 20
_LIMIT_XIDS = 50
_TEXT_LENGTH = 200

MIN_DRIVER_MAJOR = 570  # the first driver that tells which recovery action a GPU needs

_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
_RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
_NUMBER_FIELDS = {
    "ecc_uncorrected": "NVML_FI_DEV_ECC_DBE_VOL_TOTAL",
    "ecc_corrected": "NVML_FI_DEV_ECC_SBE_VOL_TOTAL",
    "remapped_rows_uncorrected": "NVML_FI_DEV_REMAPPED_UNC",
    "remap_pending": "NVML_FI_DEV_REMAPPED_PENDING",
    "remap_failure": "NVML_FI_DEV_REMAPPED_FAILURE",
}


def parse_kmsg(lines: Iterable[str], since_s: float) -> Iterator[dict[str, Any]]:
    """Yield the XIDs in records of the kernel's log, from a moment (seconds since boot) on."""
    for line in lines:
        head, separator, text = line.partition(";")
        fields = head.split(",")
        if not separator or len(fields) < 3 or not fields[2].isdigit():  # noqa: PLR2004
            continue
        match = _XID.search(text)
        at_s = int(fields[2][:18]) / 1e6
        if match is None or at_s < since_s:
            continue
        # The kernel's message leaves the function out.
        address = match[1] if "." in match[1] else f"{match[1]}.0"
        yield {
            "at_s": at_s,
            "bus_id": normal_bus_id(address) or match[1],
            "number": int(match[2]),
            "text": match[3][:_TEXT_LENGTH],
        }


def _lines(path: str) -> Iterator[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    rest = b""
    read_bytes = 0
    try:
        while read_bytes < _LIMIT_BYTES:
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                # The ring overwrote what came next; the following read goes on behind it.
                continue
            if not data:
                break
            read_bytes += len(data)
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in whole)
    finally:
        os.close(descriptor)
    if rest:
        yield rest.decode("utf-8", "replace")


def driver_major(version: str) -> int | None:
    """Return the first number of a driver's version, `None` if it has none."""
    first = version.partition(".")[0].strip()
    return int(first) if first.isascii() and first.isdigit() else None


def _problem_of(gpu: Mapping[str, Any]) -> str | None:
    if "error" in gpu:
        return f"{gpu['gpu']}: {gpu['error']}"
    number = gpu.get("recovery_action")
    if number:
        action = _ACTIONS.get(number, f"unknown action {number}")
        return f"{gpu['gpu']}: the driver asks to {action}"
    if gpu.get("remap_failure"):
        return f"{gpu['gpu']}: remapping a row of memory has failed"
    return None


class GPUHealthCheck(DeviceCheck):
    """Is every GPU there, and does the driver want nothing done to it?

    Args:
        device_index, interval, on_failure: As for `DeviceCheck`.
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
        kmsg: str = KMSG,
    ) -> None:
        super().__init__(device_index, interval, on_failure)
        self.expected_gpus = (
            check.count_of("NVRX_EXPECTED_GPUS") if expected_gpus is None else expected_gpus
        )
        self._kmsg = kmsg
        now_s, job_start_s = time.time(), check.job_start_s()
        age_s = 0.0 if job_start_s is None else now_s - job_start_s
        # As the kernel's log counts: since the boot.
        self._since_s = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - age_s)
        self._enabled: bool | None = None
        # A GPU that was there must not count as one that this node never had.
        self._most_seen = 0

    @property
    def enabled(self) -> bool:
        """Whether the driver can answer this check's questions; asked once."""
        if self._enabled is None:
            try:
                self._enabled = self._why_disabled() is None
            except NvmlUnavailableError:
                self._enabled = False
            except NvmlError:
                # A driver that is there and fails is a finding, no reason to look away.
                return True
        return self._enabled

    def _examine(self) -> Finding:
        expected = self.expected_gpus if self.device_index is None else None
        try:
            reason = self._why_disabled()
            if reason is not None and not expected:
                return Finding("skipped", reason)
            finding = self._examine_all(expected or 0, is_old=reason is not None)
        except NvmlUnavailableError as error:
            if not expected:
                return Finding("skipped", str(error))
            reason = f"no GPU is visible, {expected} are expected: {error}"
            return Finding("unhealthy", reason, {"expected_gpus": expected})
        except NvmlError as error:
            return self._with_xids(Finding("unhealthy", str(error)))
        return self._with_xids(finding)

    def _why_disabled(self) -> str | None:
        version = ask("driver_version")
        major = driver_major(version)
        if major is not None and major < MIN_DRIVER_MAJOR:
            return f"driver {version} is older than {MIN_DRIVER_MAJOR}"
        if ask("field_number", _RECOVERY_FIELD) is None:
            return "this binding does not know the recovery action: upgrade nvidia-ml-py"
        return None

    def _examine_all(self, expected: int, *, is_old: bool) -> Finding:
        wanted = {} if is_old else {"recovery_action": _RECOVERY_FIELD, **_NUMBER_FIELDS}
        numbers = {name: ask("field_number", field) for name, field in wanted.items()}
        known = {name: number for name, number in numbers.items() if number is not None}
        gpus = [_read(device, known) for device in selected_devices(self.device_index)]
        if self.device_index is None:
            self._most_seen = max(self._most_seen, len(gpus))
            expected = max(expected, self._most_seen)
        evidence: dict[str, Any] = {"gpus": gpus}
        problems = [problem for problem in map(_problem_of, gpus) if problem is not None]
        if len(gpus) < expected:
            evidence["expected_gpus"] = expected
            problems.insert(0, f"{len(gpus)} GPUs are visible, {expected} are expected")
        if problems:
            return Finding("unhealthy", "; ".join(problems), evidence)
        if not gpus:
            return Finding("skipped", "no GPU is visible")
        if not any("recovery_action" in gpu for gpu in gpus):
            reason = "these GPUs do not tell which recovery action they need"
            return Finding("skipped", reason, evidence)
        return Finding("healthy", evidence=evidence)

    def _with_xids(self, finding: Finding) -> Finding:
        try:
            xids = list(parse_kmsg(_lines(self._kmsg), self._since_s))[-_LIMIT_XIDS:]
        except OSError:
            return finding  # the log may not be read
        if not xids:
            return finding
        evidence = {**finding.evidence, "xids": xids}
        reason = finding.reason
        if finding.status == "unhealthy":
            seen = sorted({entry["number"] for entry in xids})
            reason += f" (XIDs since the job began: {', '.join(map(str, seen))})"
        return Finding(finding.status, reason, evidence)


def _read(device: int | str, known: dict[str, int]) -> dict[str, Any]:
    """Return the evidence on one GPU, without values that could not be read."""
    found: dict[str, Any] = {"gpu": device_label(device)}
    try:
        bus_id = normal_bus_id(ask("bus_id", device))
        values = ask("fields", device, [[number, 0] for number in known.values()]) if known else []
    except NvmlCallError as error:
        return {**found, "error": str(error)}
    if bus_id is not None:
        found["bus_id"] = bus_id
    for name, (code, value) in zip(known, values, strict=True):
        if code == 0:
            found[name] = value
        elif name == "recovery_action" and code not in UNSUPPORTED:
            found["error"] = f"the recovery action cannot be read: NVML error {code}"
    return found
