# SPDX-License-Identifier: Apache-2.0
"""The command of a worker, from the script and the flags, and the port of rank 0's store."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.fault_tolerance._config.syntax import NUMA_MODES
from nvidia_resiliency_ext.fault_tolerance._core.infra import has_gpu_driver
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.rank_sets import format_ranks

from .numa import MachineTopology, cpus_near

_RUN_PATH_MODULE = "nvidia_resiliency_ext.fault_tolerance._workers.run_path"
_NUMACTL = "numactl"
_LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The command that all workers of a job run."""

    argv: tuple[str, ...]  # The whole command; `${local_rank}` stands for the local rank.
    entry: str  # The script's path, the module's name or the program.
    is_module: bool
    is_python: bool
    numa: Sequence[tuple[str, ...]] = ()  # By local rank: words that bind it near its GPU.

    def for_local_rank(self, local_rank: int) -> tuple[str, ...]:
        """Return the command of one worker, with the macro and `$$` replaced as in torchrun."""
        own = self.argv
        if any("$" in word for word in own[1:]):
            from string import Template

            rest = (Template(word).safe_substitute(local_rank=local_rank) for word in own[1:])
            own = (own[0], *rest)
        return (*self.numa[local_rank], *own) if self.numa else own


def worker_command(
    script: str,
    script_args: Sequence[str],
    environ: Mapping[str, str],
    *,
    is_module: bool = False,
    is_python: bool = True,
    is_run_path: bool = False,
) -> WorkerCommand:
    python = environ.get(_env.PYTHON_EXEC) or sys.executable
    if is_run_path:
        argv = (python, "-u", "-m", _RUN_PATH_MODULE, script, *script_args)
        return WorkerCommand(argv, script, is_module=False, is_python=True)
    if not is_python:
        return WorkerCommand((script, *script_args), script, is_module=False, is_python=False)
    module = ("-m",) if is_module else ()
    argv = (python, "-u", *module, script, *script_args)
    return WorkerCommand(argv, script, is_module=is_module, is_python=True)


def numa_binding(
    nproc: int, environ: Mapping[str, str], *, is_strict: bool
) -> Sequence[tuple[str, ...]]:
    """Return the words that bind each worker to a NUMA node; none where nobody asks for it.

    With `is_strict` memory must come from that node, instead of from where the worker runs.
    """
    raw = environ.get(_env.GPUS_PER_NUMA, "").strip()
    if not raw:
        return ()
    if not raw.isascii() or not raw.isdigit() or int(raw) < 1:
        raise ValueError(f"{_env.GPUS_PER_NUMA}: {raw!r} is not a number of GPUs >= 1")
    program = find_program(_NUMACTL, environ)
    if program is None:
        raise ValueError(
            f"{_env.GPUS_PER_NUMA}={raw} needs the program {_NUMACTL!r}, which is not on PATH; "
            "install it, or unset the variable"
        )
    nodes = [str(rank // int(raw)) for rank in range(nproc)]
    return [
        (program, "--cpunodebind", node, *(("--membind", node) if is_strict else ("--localalloc",)))
        for node in nodes
    ]


def cpu_binding(
    mode: str,
    nproc: int,
    environ: Mapping[str, str],
    gpus: Sequence[str | None],
    topology: MachineTopology | None = None,
) -> Sequence[tuple[str, ...]]:
    """Return the words by which `--numa-binding` binds each worker."""
    flag = f"--numa-binding {mode}"
    if mode not in NUMA_MODES:
        raise ValueError(f"{flag}: is not one of {', '.join(NUMA_MODES)}")
    if environ.get(_env.GPUS_PER_NUMA, "").strip():
        raise ValueError(f"{flag} and {_env.GPUS_PER_NUMA} exclude each other: give one of them")
    program = find_program(_NUMACTL, environ)
    if program is None:
        raise ValueError(f"{flag} needs the program {_NUMACTL!r}, which is not on PATH; install it")
    addresses = [address for address in gpus if address is not None]
    if len(addresses) < len(gpus):
        raise ValueError(f"{flag}: the driver does not tell where all GPUs sit")
    if nproc > len(addresses):
        raise ValueError(
            f"{flag}: every local rank needs a GPU, there are {len(addresses)} for {nproc} workers;"
            f" check {_env.CUDA_VISIBLE_DEVICES} and the driver, or leave the flag out"
        )
    machine = MachineTopology() if topology is None else topology
    words = []
    for rank in range(nproc):
        try:
            cpus = format_ranks(cpus_near(mode, addresses, rank, machine))
        except ValueError as error:
            raise ValueError(
                f"{flag}: GPU {addresses[rank]} of local rank {rank}: {error}"
            ) from None
        words.append((program, f"--physcpubind={cpus}"))
    return words


def visible_gpus(environ: Mapping[str, str]) -> Sequence[str | None]:
    """Return the PCI address of each GPU that workers see; asks the driver, if there is one."""
    if not has_gpu_driver():
        return ()
    from nvidia_resiliency_ext.shared_utils.health_check import PynvmlMixin

    visible = environ.get(_env.CUDA_VISIBLE_DEVICES)
    return PynvmlMixin().get_visible_pci_addresses(visible)


def missing_script(path: str) -> str:
    """Return the reason why Python cannot run the file `path`, or an empty text."""
    if not os.path.exists(path):
        if path in ("python", "python3"):
            return f"script {path!r}: leave {path!r} out; the launcher starts Python by itself"
        near = f"; did you mean {path}.py?" if os.path.isfile(f"{path}.py") else ""
        return f"script {path!r} does not exist{near or '; name a file, or a module with -m'}"
    # Python runs a directory or an archive that holds __main__.py.
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
        if not os.path.isfile(path):
            folder = os.path.dirname(path)
            return f"script {folder!r} is a directory without __main__.py; name a file in it"
    if not os.access(path, os.R_OK):
        return f"script {path!r} cannot be read; change its permissions"
    return ""


def missing_module(name: str) -> str:
    """Return the reason why `python -m name` cannot run, or an empty text; import nothing of it."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    head, _, rest = name.partition(".")
    if not name.isprintable() or not all(part.isidentifier() for part in name.split(".")):
        return f"{name!r} is no name of a module; with -m a module is named, a file without -m"
    here = PathFinder.find_spec(head, [os.getcwd()])
    try:
        spec = here or find_spec(head)
    except ValueError:  # a module of this process without a specification
        return ""
    if spec is None:
        return f"module {name!r} does not exist: there is no {head!r} here or in this environment"
    inside = spec.submodule_search_locations
    # Only `head` was looked for: a package may say itself where its modules are.
    if rest == "py" and inside is None:
        return f"module {name!r} does not exist: leave -m out to run a file, or write -m {head}"
    if not rest and inside is not None and PathFinder.find_spec(f"{name}.__main__", inside) is None:
        return f"module {name!r} is a package without __main__; name a module in it: -m {name}.NAME"
    return ""


def hidden_packages(command: WorkerCommand) -> list[str]:
    """Return a sentence for each package or module that a file beside the program hides from it.

    Of the standard library those count that every worker loads, as this process did, less those
    that Python itself loads before it looks into the program's folder.
    """
    if not command.is_python:
        return []
    entry = os.path.abspath(command.entry)
    folder = os.getcwd() if command.is_module else os.path.dirname(entry)
    standard = sys.stdlib_module_names & sys.modules.keys() - set(sys.builtin_module_names)
    packages = ("nvidia_resiliency_ext", "torch", "numpy")
    try:
        beside = set(os.listdir(folder))  # one call: the folder may be on a slow file system
    except OSError:
        return []
    files = {}
    for name in (*packages, *sorted(standard)):
        path = os.path.join(folder, name)
        file = f"{path}.py" if f"{name}.py" in beside else os.path.join(path, "__init__.py")
        if f"{name}.py" in beside or (name in beside and os.path.isfile(file)):
            files[name] = file
    loaded = _loaded_at_start(command) if files.keys() & standard else set()
    return [
        f"{file} hides the {'package' if name in packages else 'standard module'} {name} from the"
        " program; rename it"
        for name, file in files.items()
        if name not in loaded
    ]


def _loaded_at_start(command: WorkerCommand) -> set[str]:
    """Return the modules that a bare interpreter has loaded; none where it does not say."""
    import subprocess

    # What is beside the program is not looked at: `sys` is built in.
    look = [command.argv[0], "-c", "import sys; print(*sys.modules)"]
    try:
        done = subprocess.run(look, capture_output=True, text=True, check=False, timeout=_LOOK_S)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(done.stdout.split())


def find_program(
    name: str, environ: Mapping[str, str], mode: int = os.F_OK | os.X_OK
) -> str | None:
    import shutil

    return shutil.which(name, mode, environ.get("PATH") or os.defpath)


def missing_program(name: str, environ: Mapping[str, str]) -> str:
    """Return the reason why the program `name` cannot be executed, or an empty text."""
    if find_program(name, environ) is not None:
        return ""
    if find_program(name, environ, os.F_OK) is not None:
        return f"program {name!r} is not executable; change its permissions"
    return f"program {name!r} does not exist or is not on PATH"


class PortInUseError(NvrxError):
    """The port that the user fixed is taken."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"--master-port {port}: the port is in use on this host; "
            f"choose another, or leave the flag out for a free one"
        )
        self.port = port


class PortReservation:
    """A bound socket that never listens.

    With SO_REUSEADDR on both sides the store of rank 0 can bind and listen beside it, while the
    kernel gives the port to nobody who asks for "any free port".
    """

    def __init__(self, port: int | None = None) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if port is not None:
                # It also listens: a bind with SO_REUSEADDR alone would not tell of a listener.
                socket.create_server(("", port), backlog=1).close()
            self._socket.bind(("", port or 0))
        except OSError as error:
            self._socket.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES) and port is not None:
                raise PortInUseError(port) from None
            raise
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()
