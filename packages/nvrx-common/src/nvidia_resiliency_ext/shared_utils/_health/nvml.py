# SPDX-License-Identifier: Apache-2.0
"""Questions to the driver with plain answers; handles never leave this module."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from nvidia_resiliency_ext.shared_utils.abandonable import StuckError
from nvidia_resiliency_ext.shared_utils.errors import NvrxError


class NvmlError(NvrxError):
    """Base of the errors of this module."""


class NvmlUnavailableError(NvmlError):
    """There is no driver, no library or no binding: nothing to look at, which is no failure."""


class NvmlCallError(NvmlError):
    """The driver answered with an error."""

    # Numbers of nvmlReturn_t, which never change.
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13

    def __init__(self, query: str, code: int, text: str) -> None:
        super().__init__(query, code, text)
        self.query = query
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"NVML {self.query}: {self.text} ({self.code})"

    @property
    def is_unsupported(self) -> bool:
        """Whether this hardware, driver or binding does not know what was asked."""
        return self.code in {self.NOT_SUPPORTED, self.FUNCTION_NOT_FOUND}


class DriverHungError(NvmlError, StuckError):
    """A driver call did not return in time."""

    def __str__(self) -> str:
        return f"hung driver: NVML {StuckError.__str__(self)}"


FieldValue = tuple[int, int]  # nvmlReturn_t, value

UNSUPPORTED = frozenset(
    {NvmlCallError.INVALID_ARGUMENT, NvmlCallError.NOT_SUPPORTED, NvmlCallError.FUNCTION_NOT_FOUND}
)
"""Answers about a field, a link or a version of a structure that the device does not have."""

_LIBRARY = "libnvidia-ml.so.1"
_ABSENT = frozenset(
    {
        NvmlCallError.NO_PERMISSION,
        NvmlCallError.DRIVER_NOT_LOADED,
        NvmlCallError.LIBRARY_NOT_FOUND,
        NvmlCallError.FUNCTION_NOT_FOUND,
    }
)
# The session of the library is gone, or belongs to a driver that has been replaced.
_RELOADED = frozenset({1, NvmlCallError.DRIVER_NOT_LOADED, 18})
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def load_binding() -> ModuleType:
    try:
        # Looked for first: without a driver, importing the binding is most of what a check costs.
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NvmlUnavailableError(f"no NVIDIA driver: {error}") from error
    try:
        import pynvml
    except ImportError as error:
        message = "the Python binding is missing: pip install 'nvrx-common[gpu]'"
        raise NvmlUnavailableError(message) from error
    found: ModuleType = pynvml
    return found


class NvmlQueries:
    """Asks the binding; whoever asks by name, with `answer`, need not care for the session."""

    def __init__(self, binding: Any) -> None:
        self._nvml = binding
        self._was_open = False

    def answer(self, query: str, arguments: Sequence[Any]) -> Any:
        """Answer one question, by the name of a method below; open the session when needed."""
        ask = getattr(self, query)
        try:
            if not self._was_open:
                self._open()
            try:
                return ask(*arguments)
            except NvmlCallError as error:
                if error.code not in _RELOADED:
                    raise
            self._reopen()
            return ask(*arguments)
        except NvmlError:
            raise
        except Exception as error:
            # An old or a broken binding: nothing that the hardware could help.
            problem = f"the Python binding fails at {query}: {type(error).__name__}: {error}"
            raise NvmlUnavailableError(problem) from error

    def _open(self) -> None:
        try:
            self._call("nvmlInit")
        except NvmlCallError as error:
            if error.code in _ABSENT and not self._was_open:
                raise NvmlUnavailableError(str(error)) from error
            raise
        self._was_open = True

    def _reopen(self) -> None:
        """Give the session up and make a new one, as after a reload of the driver."""
        # It may be gone already; that is why we are here.
        with suppress(NvmlCallError):
            self._call("nvmlShutdown")
        self._open()

    def driver_version(self) -> str:
        return _text(self._call("nvmlSystemGetDriverVersion"))

    def device_count(self) -> int:
        return int(self._call("nvmlDeviceGetCount"))

    def name(self, device: int | str) -> str:
        return _text(self._call("nvmlDeviceGetName", self._handle(device)))

    def uuid(self, device: int | str) -> str:
        return _text(self._call("nvmlDeviceGetUUID", self._handle(device)))

    def mig_uuids(self, device: int | str) -> list[str]:
        handle = self._handle(device)
        try:
            count = int(self._call("nvmlDeviceGetMaxMigDeviceCount", handle))
        except NvmlCallError as error:
            if error.is_unsupported:
                return []
            raise
        found = []
        for index in range(count):
            try:
                mig = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
                found.append(_text(self._call("nvmlDeviceGetUUID", mig)))
            except NvmlCallError as error:
                if error.code not in {NvmlCallError.NOT_FOUND, NvmlCallError.NOT_SUPPORTED}:
                    raise
        return found

    def bus_id(self, device: int | str) -> str:
        """Return the PCI address as the driver writes it."""
        return _text(self._call("nvmlDeviceGetPciInfo", self._handle(device)).busId)

    def memory(self, device: int | str) -> list[int]:
        """Return total, used and free bytes; old drivers count what they reserve as used."""
        handle = self._handle(device)
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        if version is not None:
            try:
                found = self._call("nvmlDeviceGetMemoryInfo", handle, version=version)
            except NvmlCallError as error:
                if error.code not in UNSUPPORTED:
                    raise
            else:
                return [int(found.total), int(found.used), int(found.free)]
        found = self._call("nvmlDeviceGetMemoryInfo", handle)
        return [int(found.total), int(found.used), int(found.free)]

    def fields(self, device: int | str, wanted: list[list[int]]) -> list[FieldValue]:
        """Return the answer to each field, given as number and scope (such as a link)."""
        handle = self._handle(device)
        pairs = [tuple(pair) for pair in wanted]
        return [_field(value) for value in self._call("nvmlDeviceGetFieldValues", handle, pairs)]

    def field_number(self, name: str) -> int | None:
        """Return the number of a field; `None` when this binding does not know it."""
        found = getattr(self._nvml, name, None)
        return None if found is None else int(found)

    def link_state(self, device: int | str, link: int) -> int:
        """Return 1 for a link that is up, 0 for one that is disabled."""
        return int(self._call("nvmlDeviceGetNvLinkState", self._handle(device), link))

    def link_error_counter(self, device: int | str, link: int, counter: int) -> int:
        handle = self._handle(device)
        return int(self._call("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter))

    def _handle(self, device: int | str) -> Any:
        if isinstance(device, str):
            return self._call("nvmlDeviceGetHandleByUUID", device)
        return self._call("nvmlDeviceGetHandleByIndex", device)

    def _call(self, function: str, *arguments: Any, **options: Any) -> Any:
        found: Callable[..., Any] | None = getattr(self._nvml, function, None)
        if found is None:
            missing = NvmlCallError.FUNCTION_NOT_FOUND
            raise NvmlCallError(function, missing, "the binding does not have it")
        try:
            return found(*arguments, **options)
        except self._nvml.NVMLError as error:
            code = int(getattr(error, "value", 999))
            raise NvmlCallError(function, code, str(error)) from error


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _field(value: Any) -> FieldValue:
    code = int(value.nvmlReturn)
    if code:
        return code, 0
    kind = int(value.valueType)
    if not 0 <= kind < len(_MEMBERS):
        return NvmlCallError.NOT_SUPPORTED, 0
    return 0, int(getattr(value.value, _MEMBERS[kind]))
