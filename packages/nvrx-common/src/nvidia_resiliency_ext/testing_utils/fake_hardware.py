# SPDX-License-Identifier: Apache-2.0
"""Hardware that a test machine lacks: a driver, a tree of /sys, a node health daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from nvidia_resiliency_ext.shared_utils.os_utils import atomic_write

__all__ = ["FakeDriver", "FakeNodeDaemon", "FakeNvml", "FakeSysfs", "NoCompilerError", "fake_sysfs"]

_METHOD = "RunHealthCheck"
_SERVICE = "nvhcd.HealthCheckService"
_SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml.c")
_LIBRARY = "libnvidia-ml.so.1"
_COMPILE_TIMEOUT_S = 60
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NOT_FOUND = 2, 3, 6
_FIELDS = {
    "NVML_FI_DEV_ECC_SBE_VOL_TOTAL": 3, "NVML_FI_DEV_ECC_DBE_VOL_TOTAL": 4,
    "NVML_FI_DEV_REMAPPED_UNC": 143, "NVML_FI_DEV_REMAPPED_PENDING": 144,
    "NVML_FI_DEV_REMAPPED_FAILURE": 145, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 230,
}  # fmt: skip


class FakeNodeDaemon:
    """A node health daemon on a Unix socket; a context manager that serves until it is closed.

    Needs grpcio and protobuf (``nvrx-common[grpc]``).

    Args:
        socket_path: Where to listen.
        answer: Fields of the answer: success, exit_code, output, error.
        handler: Called with the arguments of each request before it is answered; it may return
            bytes to be sent in place of an answer, or wait.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        answer: dict[str, Any] | None = None,
        handler: Callable[[list[str]], bytes | None] | None = None,
    ) -> None:
        import grpc

        self.socket_path = os.fspath(socket_path)
        self.answer: dict[str, Any] = answer or {"success": True, "output": "{}"}
        self.requests: list[list[str]] = []
        self._handler = handler
        self._executor = ThreadPoolExecutor(2)
        self._server = grpc.server(self._executor)
        method = grpc.unary_unary_rpc_method_handler(self._serve)
        service = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: method})
        self._server.add_generic_rpc_handlers((service,))
        self._server.add_insecure_port(f"unix:{self.socket_path}")
        self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.stop(None).wait()
        self._executor.shutdown()

    def __enter__(self) -> FakeNodeDaemon:  # noqa: PYI034 - Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, request: bytes, _context: Any) -> bytes:
        from nvidia_resiliency_ext.shared_utils.proto import nvhcd_pb2

        arguments = list(nvhcd_pb2.HealthCheckRequest.FromString(request).args)
        self.requests.append(arguments)
        if self._handler is not None and (instead := self._handler(arguments)) is not None:
            return instead
        answer: bytes = nvhcd_pb2.HealthCheckResponse(**self.answer).SerializeToString()
        return answer


class NoCompilerError(Exception):
    """There is no C compiler on this machine, or it does not work."""


class FakeDriver:
    """A ``libnvidia-ml.so.1`` in a `folder` of its own, for programs started with `environment`.

    It must exist: library, control file (first with `answers`) and record of calls go there.

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
        """Return the environment variables by which a program finds this driver."""
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
        atomic_write(self._control, text.encode("ascii"), mode=None, fsync=False)

    def _build(self) -> None:
        if not os.path.exists(_SOURCE):  # else it would pass for a compiler's fault
            raise FileNotFoundError(f"{_SOURCE} is missing: install nvrx-common again")
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

    Its functions with NVML's names, such as `nvmlDeviceGetCount`, take NVML's arguments.

    Attributes:
        answers: By the keys of ``nvml.c``; may be changed at any time.
        calls: Names of the functions called so far.
        released: Calls of functions with a `hang` key return when this is set.

    Example:
        >>> FakeNvml({"count": 8}).nvmlDeviceGetCount()
        8
    """

    class NVMLError(Exception):
        """Error of the binding; `value` is the driver's number."""

        def __init__(self, value: int) -> None:
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self, answers: Mapping[str, object] | None = None) -> None:
        self.answers: dict[str, Any] = dict(answers or {})
        self.calls: list[str] = []
        self.released = threading.Event()

    def __dir__(self) -> list[str]:
        """Return the functions of NVML and the fields, too."""
        return [*super().__dir__(), *_FUNCTIONS, *_FIELDS]

    def __getattr__(self, name: str) -> Any:
        """Return a function of NVML, or the number of a field."""
        if name in _FIELDS:
            return _FIELDS[name]
        if name not in _FUNCTIONS:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if f"hang.{name}" in self.answers:
                self.released.wait()
            if code := self.answers.get(f"return.{name}", 0):
                raise self.NVMLError(code)
            return _FUNCTIONS[name](self, *arguments)

        return call


def _by_index(fake: FakeNvml, index: int) -> int:
    if index >= fake.answers.get("count", 0):
        raise fake.NVMLError(_INVALID_ARGUMENT)
    if f"gone.{index}" in fake.answers:
        raise fake.NVMLError(fake.answers[f"gone.{index}"])
    return index


def _by_uuid(fake: FakeNvml, uuid: str) -> int:
    for index in range(fake.answers.get("count", 0)):
        if fake.nvmlDeviceGetUUID(index) == uuid:
            return index
    raise fake.NVMLError(_NOT_FOUND)


def _memory(fake: FakeNvml, handle: int) -> SimpleNamespace:
    names = ("total", "used", "free")
    return SimpleNamespace(**{n: fake.answers.get(f"memory.{handle}.{n}", 0) for n in names})


def _pci(fake: FakeNvml, handle: int) -> SimpleNamespace:
    bus_id = fake.answers.get(f"bus.{handle}", f"00000000:{0x10 + handle:02X}:00.0")
    return SimpleNamespace(busId=str(bus_id).encode())


def _number(fake: FakeNvml, key: str, otherwise: int) -> int:
    if key not in fake.answers:
        raise fake.NVMLError(otherwise)
    return int(fake.answers[key])


def _field(fake: FakeNvml, handle: int, number: int, scope: int) -> SimpleNamespace:
    code = fake.answers.get(f"fielderror.{handle}.{number}", 0)
    key = f"field.{handle}.{number}"
    value = fake.answers.get(f"{key}.{scope}", fake.answers.get(key))
    if value is None and not code:
        code = _NOT_SUPPORTED
    return SimpleNamespace(nvmlReturn=code, valueType=3, value=SimpleNamespace(ullVal=value))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda _: None,
    "nvmlShutdown": lambda _: None,
    "nvmlSystemGetDriverVersion": lambda fake: str(fake.answers.get("driver", "570.86.10")),
    "nvmlDeviceGetCount": lambda fake: int(fake.answers.get("count", 0)),
    "nvmlDeviceGetHandleByIndex": _by_index,
    "nvmlDeviceGetHandleByUUID": _by_uuid,
    "nvmlDeviceGetName": lambda fake, _: str(fake.answers.get("name", "NVIDIA H100 80GB HBM3")),
    "nvmlDeviceGetUUID": lambda fake, handle: str(
        fake.answers.get(f"uuid.{handle}", f"GPU-{handle:08d}-0000-0000-0000-0000000")
    ),
    "nvmlDeviceGetPciInfo": _pci,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetFieldValues": lambda fake, handle, fields: [
        _field(fake, handle, number, scope) for number, scope in fields
    ],
    "nvmlDeviceGetNvLinkState": lambda fake, handle, link: _number(
        fake, f"link.{handle}.{link}", _INVALID_ARGUMENT
    ),
    "nvmlDeviceGetNvLinkErrorCounter": lambda fake, handle, link, counter: _number(
        fake, f"counter.{handle}.{link}.{counter}", _NOT_SUPPORTED
    ),
}


class FakeSysfs:
    """A tree below `root`, for the parameter `sysfs_root` of checks.

    Addresses (`bus_id`, `bridges`, outermost first) are those of PCI, such as `0000:3b:00.0`;
    `name` is an adapter, `port` and `ports` are its ports from 1, `netdev` is a network device.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        for folder in ("bus/pci/devices", "class/infiniband", "devices"):
            os.makedirs(f"{self.root}/{folder}", exist_ok=True)

    def __fspath__(self) -> str:
        """Return the folder, so that the tree itself can be given as `sysfs_root`."""
        return self.root

    def add_device(self, bridges: Sequence[str], bus_id: str) -> str:
        """Add a PCI device below bridges, outermost first; return its folder."""
        domain = (*bridges, bus_id)[0].rpartition(":")[0]
        folder = f"{self.root}/devices/pci{domain}"
        for each in (*bridges, bus_id):
            folder = f"{folder}/{each}"
            os.makedirs(folder, exist_ok=True)
            link = f"{self.root}/bus/pci/devices/{each}"
            if not os.path.islink(link):
                os.symlink(folder, link)
        return folder

    def add_nic(
        self,
        name: str,
        bridges: Sequence[str],
        bus_id: str,
        *,
        ports: Sequence[int] = (1,),
        netdev: str | None = None,
    ) -> None:
        """Add an adapter with active ports and all counters at zero."""
        device = self.add_device(bridges, bus_id)
        folder = f"{self.root}/class/infiniband/{name}"
        os.makedirs(folder)
        os.symlink(device, f"{folder}/device")
        for port in ports:
            self.set_state(name, "4: ACTIVE", port=port)
            self.set_counter(name, "link_downed", 0, port=port)
        if netdev is not None:
            self.set_carrier(name, netdev, has_carrier=True)

    def add_efa(self, name: str, bridges: Sequence[str], bus_id: str) -> None:
        """Add an Elastic Fabric Adapter: one active port, and counters in `hw_counters` alone."""
        self.add_nic(name, bridges, bus_id)
        shutil.rmtree(f"{self.root}/class/infiniband/{name}/ports/1/counters")
        for counter in ("rx_bytes", "rx_drops", "rx_pkts", "tx_bytes", "tx_pkts"):
            self.set_counter(name, counter, 0, folder="hw_counters")

    def set_state(self, name: str, state: str, *, port: int = 1) -> None:
        """Set the `state` of a port, such as `4: ACTIVE`."""
        self._write(f"class/infiniband/{name}/ports/{port}/state", state)

    def set_counter(
        self, name: str, counter: str, value: int, *, port: int = 1, folder: str = "counters"
    ) -> None:
        """Set a `counter` of a port to `value`, in `folder` `counters` or `hw_counters`."""
        self._write(f"class/infiniband/{name}/ports/{port}/{folder}/{counter}", str(value))

    def set_carrier(self, name: str, netdev: str, *, has_carrier: bool) -> None:
        """Set whether (`has_carrier`) a network device of an adapter has a carrier."""
        self._write(f"class/infiniband/{name}/device/net/{netdev}/carrier", str(int(has_carrier)))

    def remove_nic(self, name: str) -> None:
        """Take an adapter away, as the kernel does when it fails."""
        shutil.rmtree(f"{self.root}/class/infiniband/{name}")

    def set_lustre(self, state: str) -> None:
        """Set the `state` that Lustre reports in its health file, such as `healthy`."""
        self._write("fs/lustre/health_check", state)

    def _write(self, path: str, text: str) -> None:
        target = f"{self.root}/{path}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii") as file:
            file.write(text + "\n")


def fake_sysfs(
    root: str | os.PathLike[str], nics: Mapping[str, str] | None = None, gpus: Sequence[str] = ()
) -> FakeSysfs:
    """Make a tree in folder `root` with adapters `nics`, by name, and `gpus`.

    Of each the path is given, as PCI addresses from the root port down, joined by ``/``.
    """
    tree = FakeSysfs(root)
    for path in gpus:
        *bridges, bus_id = path.split("/")
        tree.add_device(bridges, bus_id)
    for name, path in (nics or {}).items():
        *bridges, bus_id = path.split("/")
        tree.add_nic(name, bridges, bus_id)
    return tree
