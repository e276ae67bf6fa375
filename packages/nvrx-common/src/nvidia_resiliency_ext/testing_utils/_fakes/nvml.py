# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the GPU driver: a C library for the real binding, an object for the fast tests.

Both answer by the same keys, which ``nvml.c`` lists. With the library, real ``nvidia-ml-py`` code
runs; the object needs no compiler and takes the place of the binding.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FakeDriver", "FakeNvml", "NoCompilerError"]

_SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml.c")
_LIBRARY = "libnvidia-ml.so.1"
_COMPILE_TIMEOUT_S = 60
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND = 2, 3, 6


class NoCompilerError(Exception):
    """There is no C compiler on this machine, or it does not work."""


class FakeDriver:
    """A ``libnvidia-ml.so.1`` in a folder of its own, for programs started with `environment`.

    Args:
        folder: Where library, control file and record of calls go; it must exist.
        answers: First content of the control file.

    Raises:
        NoCompilerError: The library cannot be built here.
    """

    def __init__(
        self, folder: str | os.PathLike[str], answers: Mapping[str, object] | None = None
    ) -> None:
        self.folder = os.fspath(folder)
        self._control = os.path.join(self.folder, "control")
        self._calls = os.path.join(self.folder, "calls")
        self._answers: dict[str, object] = dict(answers or {})
        self._build()
        self._write()

    def environment(self) -> dict[str, str]:
        """Return what a program needs in its environment to meet this driver."""
        return {
            "LD_LIBRARY_PATH": self.folder,
            "FAKE_NVML_CONTROL": self._control,
            "FAKE_NVML_CALLS": self._calls,
        }

    def set(self, **answers: object) -> None:
        """Change answers; a dot in a key is written as two underscores, `None` removes a key."""
        for name, value in answers.items():
            key = name.replace("__", ".")
            if value is None:
                self._answers.pop(key, None)
            else:
                self._answers[key] = value
        self._write()

    def calls(self) -> list[tuple[int, str]]:
        """Return process and function of every call so far."""
        try:
            with open(self._calls, encoding="ascii") as file:
                pairs = [line.split() for line in file]
        except FileNotFoundError:
            return []
        return [(int(pid), function) for pid, function in pairs]

    def _write(self) -> None:
        # Replaced as a whole: a driver call may read it at this moment.
        text = "".join(f"{key} {value}\n" for key, value in self._answers.items())
        with open(f"{self._control}.new", "w", encoding="ascii") as file:
            file.write(text)
        os.replace(f"{self._control}.new", self._control)

    def _build(self) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise NoCompilerError("no C compiler is on PATH")
        target = os.path.join(self.folder, _LIBRARY)
        command = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{_LIBRARY}"]
        done = subprocess.run(
            [*command, "-o", target, _SOURCE],
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise NoCompilerError(f"{compiler} fails: {done.stderr[-500:]}")


class FakeNvml:
    """Takes the place of the module `pynvml`: ``health_check.set_nvml(FakeNvml({"count": 8}))``.

    Methods with NVML's names take NVML's arguments: `index` or `uuid` of a device, its `handle`, a
    `link`, a `counter`, pairs of `fields`.

    Attributes:
        answers: By the keys of ``nvml.c``; may be changed at any time.
        calls: Names of the functions called so far.
        released: Calls of functions with a `hang` key return when this is set.
    """

    class NVMLError(Exception):
        """What the binding raises; `value` is the driver's number."""

        def __init__(self, value: int) -> None:
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self, answers: Mapping[str, object] | None = None) -> None:
        self.answers: dict[str, Any] = dict(answers or {})
        self.calls: list[str] = []
        self.released = threading.Event()

    def __getattr__(self, name: str) -> Any:
        """Return the number of a field."""
        number = _FIELDS.get(name)
        if number is None:
            raise AttributeError(name)
        return number

    def nvmlInit(self) -> None:  # noqa: N802 - the binding's names, here and below
        """Begin."""
        self._enter("nvmlInit")

    def nvmlShutdown(self) -> None:  # noqa: N802
        """End."""
        self._enter("nvmlShutdown")

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        """Return the version."""
        self._enter("nvmlSystemGetDriverVersion")
        return str(self.answers.get("driver", "570.86.10"))

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """Return the number of GPUs."""
        self._enter("nvmlDeviceGetCount")
        return int(self.answers.get("count", 0))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        """Return a handle."""
        self._enter("nvmlDeviceGetHandleByIndex")
        if index >= self.answers.get("count", 0):
            raise self.NVMLError(_INVALID_ARGUMENT)
        if f"gone.{index}" in self.answers:
            raise self.NVMLError(self.answers[f"gone.{index}"])
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        """Return a handle."""
        self._enter("nvmlDeviceGetHandleByUUID")
        for index in range(self.answers.get("count", 0)):
            if self.nvmlDeviceGetUUID(index) == uuid:
                return index
        raise self.NVMLError(_NOT_FOUND)

    def nvmlDeviceGetName(self, _handle: int) -> str:  # noqa: N802
        """Return the product."""
        self._enter("nvmlDeviceGetName")
        return str(self.answers.get("name", "NVIDIA H100 80GB HBM3"))

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        """Return the UUID."""
        self._enter("nvmlDeviceGetUUID")
        return str(self.answers.get(f"uuid.{handle}", f"GPU-{handle:08d}-0000-0000-0000-0000000"))

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        """Return the address."""
        self._enter("nvmlDeviceGetPciInfo")
        bus_id = self.answers.get(f"bus.{handle}", f"00000000:{0x10 + handle:02X}:00.0")
        return SimpleNamespace(busId=str(bus_id).encode())

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        """Return the memory."""
        self._enter("nvmlDeviceGetMemoryInfo")
        names = ("total", "used", "free")
        return SimpleNamespace(**{n: self.answers.get(f"memory.{handle}.{n}", 0) for n in names})

    def nvmlDeviceGetFieldValues(  # noqa: N802
        self, handle: int, fields: list[tuple[int, int]]
    ) -> list[SimpleNamespace]:
        """Return values of fields."""
        self._enter("nvmlDeviceGetFieldValues")
        return [self._field(handle, number, scope) for number, scope in fields]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
        """Return a link's state."""
        self._enter("nvmlDeviceGetNvLinkState")
        return self._answer(f"link.{handle}.{link}", _INVALID_ARGUMENT)

    def nvmlDeviceGetNvLinkErrorCounter(  # noqa: N802
        self, handle: int, link: int, counter: int
    ) -> int:
        """Return a link's counter."""
        self._enter("nvmlDeviceGetNvLinkErrorCounter")
        return self._answer(f"counter.{handle}.{link}.{counter}", _NOT_SUPPORTED)

    def _enter(self, function: str) -> None:
        self.calls.append(function)
        if f"hang.{function}" in self.answers:
            self.released.wait()
        code = self.answers.get(f"return.{function}", 0)
        if code:
            raise self.NVMLError(code)

    def _answer(self, key: str, otherwise: int) -> int:
        if key not in self.answers:
            raise self.NVMLError(otherwise)
        return int(self.answers[key])

    def _field(self, handle: int, number: int, scope: int) -> SimpleNamespace:
        code = self.answers.get(f"fielderror.{handle}.{number}", 0)
        key = f"field.{handle}.{number}"
        value = self.answers.get(f"{key}.{scope}", self.answers.get(key))
        if value is None and not code:
            code = _NOT_SUPPORTED
        found = SimpleNamespace(ullVal=value)
        return SimpleNamespace(nvmlReturn=code, valueType=3, value=found)


_FIELDS = {
    "NVML_FI_DEV_ECC_SBE_VOL_TOTAL": 3,
    "NVML_FI_DEV_ECC_DBE_VOL_TOTAL": 4,
    "NVML_FI_DEV_REMAPPED_UNC": 143,
    "NVML_FI_DEV_REMAPPED_PENDING": 144,
    "NVML_FI_DEV_REMAPPED_FAILURE": 145,
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 230,
}
