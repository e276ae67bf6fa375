# SPDX-License-Identifier: Apache-2.0
"""Why a worker must be started cold, and what a prewarmed worker imports; it starts nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

from .command import WorkerCommand

# Variables that are read at import, as the start-up hook of a prewarmed worker takes them.
WATCH_LIST: Mapping[str, tuple[str, ...]] = {
    "prefixes": (
        # The interpreter and libc.
        "PYTHON", "LD_", "LC_", "MALLOC_",
        # numpy, torch and their libraries.
        "OMP_", "GOMP_", "KMP_", "MKL_", "I_MPI_", "OPENBLAS_", "GOTO_", "GOTOBLAS_", "NPY_",
        "NUMPY_", "GFORTRAN_", "DNNL_", "ONEDNN_", "MKLDNN_", "OPENSSL_", "ACC_", "TQDM_",
        "TORCH", "PYTORCH", "FX_", "COMPILE_STROBELIGHT_",
        # What DistributedDataParallel imports when it is first used.
        "INDUCTOR_", "AOT_", "PARTITIONER_", "SYMPY_", "MPMATH_", "CUTEDSL_", "PT2_",
        # Not known without a device, so taken for import-time.
        "CUDA", "CUBLAS", "CUDNN", "NVIDIA_", "TRITON",
    ),
    "names": (
        "FAKE_ALLOW_META", "GLIBC_TUNABLES", "KINETO_USE_DAEMON", "LANG", "LANGUAGE",
        "LOG_TLPARSE", "UNSAFE_SKIP_FSDP_MODULE_GUARDS",
    ),
    # Read when they are needed, although a prefix above covers them.
    "late_prefixes": ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_"),
    "late": (
        "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "DNNL_MAX_CPU_ISA", "MKL_CBWR",
        "MKL_VERBOSE", "ONEDNN_MAX_CPU_ISA", "TORCHINDUCTOR_CACHE_DIR", "TORCH_DIST_INIT_BARRIER",
        # The launcher's own way to choose the interpreter, read before there is one.
        "PYTHON_EXEC",
        # Set by Lightning when it is imported, after torch; torch reads it at each call.
        "PYTORCH_NVML_BASED_CUDA_CHECK",
    ),
}  # fmt: skip
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")


def is_import_time(name: str) -> bool:
    """Return whether a value set after the imports would be lost."""
    if name in WATCH_LIST["late"] or name.startswith(WATCH_LIST["late_prefixes"]):
        return False
    return name in WATCH_LIST["names"] or name.startswith(WATCH_LIST["prefixes"])


def set_in_text(text: str) -> str | None:
    """Return the first import-time variable that a script's text seems to set, or None.

    Reading one looks the same; that costs a warm start, the other mistake would cost a value.
    """
    lines = text.splitlines()
    for number, line in enumerate(lines):
        code = line.lstrip()
        # A call such as `os.environ.update({...})` goes on in the next lines.
        if not code.startswith("#") and ("environ" in code or "putenv" in code):
            for name in _NAME.findall("\n".join(lines[number : number + 3])):
                if is_import_time(name):
                    return str(name)
    return None


_LOOKING_VARIABLES = (
    "PYTHONINSPECT",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONTRACEMALLOC",
    "PYTHONVERBOSE",
)
_LARGEST_ENTRY_BYTES = 4 << 20
_LIBTORCH = "libtorch_cpu"


def cold_reason(command: WorkerCommand, env: Mapping[str, str], prewarm: str) -> str | None:
    """Return why workers of this command must start cold, or None; `prewarm` is the option."""
    if prewarm == "off":
        return "--ft-prewarm off"
    if not command.is_python:
        return "the command is not a Python script or module"
    if not _is_this_python(command.argv[0]):
        return f"the workers' interpreter is not {sys.executable}"
    for variable in _LOOKING_VARIABLES:
        if env.get(variable):
            return f"{variable} is set"
    if os.pathsep in os.path.dirname(__file__):
        return "the installation folder has a colon in its name"
    path = entry_file(command)
    text = None if path is None else read_text(path)
    name = set_in_text(text) if text is not None else None
    if name is not None:
        return f"{command.entry} names {name}, which is read at import"
    return None


def go_reason(prewarmed_env: Mapping[str, str], worker_env: Mapping[str, str]) -> str | None:
    """Return why a prewarmed worker cannot take over a worker's environment, or None."""
    old, new = prewarmed_env, worker_env
    names = [n for n in {*old, *new} if old.get(n) != new.get(n) and is_import_time(n)]
    return f"{min(names)} is read at import and differs from the standby's" if names else None


def _is_this_python(word: str) -> bool:
    if word == sys.executable:
        return True
    # Another link to the same file can belong to another virtual environment.
    same_folder = os.path.dirname(word) == os.path.dirname(sys.executable)
    return same_folder and os.path.realpath(word) == os.path.realpath(sys.executable)


def entry_file(command: WorkerCommand) -> str | None:
    """Return the source file that a command runs, or None; nothing is imported.

    Of modules only plain files in the working directory and on this interpreter's path are found.
    """
    bases = [command.entry]
    if command.is_module:
        parts = command.entry.split(".")
        bases = [os.path.join(folder, *parts) for folder in ("", *sys.path)]
    for base in bases:
        plain = f"{base}.py" if command.is_module else base
        for path in (plain, os.path.join(base, "__main__.py")):
            if os.path.isfile(path):
                return path
    return None


def read_text(path: str) -> str | None:
    """Return the text of a source file, or None for a file that is unreadable or too large."""
    try:
        # A script may come through a pipe; what is read here would be missing there.
        data = read_regular_file(path, _LARGEST_ENTRY_BYTES + 1, follows_symlink=True)
    except OSError:
        return None
    return data.decode("utf-8", "replace") if len(data) <= _LARGEST_ENTRY_BYTES else None


def wants_prewarming(worker_pids: Sequence[int]) -> bool | None:
    """Return whether a worker maps libtorch, so that prewarming helps; None: they are ending."""
    if any(procfs.maps_name(pid, _LIBTORCH) for pid in worker_pids):
        return True
    return False if worker_pids and all(procfs.maps_name(p, "") for p in worker_pids) else None


# In this order: between two entries a prewarmed worker looks whether "go" is there already, and a
# script gets each entry with those before it when it first imports something of it. `torch._dynamo`
# is what DistributedDataParallel imports when the first model is wrapped, half of a restart,
# `_cupti_monitor` what the first backward pass adds. Ours are what a rank needs until its session
# with the monitor stands, 60 ms of CPU; none of them imports torch. Any but torch may be missing in
# the installed versions.
DEFAULT_IMPORTS = (
    "numpy", "nvidia_resiliency_ext.fault_tolerance.rank_monitor_client",
    "nvidia_resiliency_ext.fault_tolerance.config",
    "nvidia_resiliency_ext.fault_tolerance.ipc_connector",
    "nvidia_resiliency_ext.fault_tolerance.timeouts_calc",
    "nvidia_resiliency_ext.fault_tolerance._monitor.link",
    "nvidia_resiliency_ext.shared_utils.events", "torch", "torch.distributed",
    "torch.profiler._cupti_monitor", "sympy", "torch._dynamo",
)  # fmt: skip


def import_list(text: str) -> tuple[str, ...]:
    """Return the modules of a comma-separated list; the default list when it names none."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    return names or DEFAULT_IMPORTS


def with_optional(names: Sequence[str]) -> list[tuple[str, bool]]:
    """Return each name with whether a prewarmed worker may go on when there is no such module."""
    return [(name, name in DEFAULT_IMPORTS and name != "torch") for name in names]


IMPORTS_TORCH = frozenset(
    (
        "accelerate", "apex", "deepspeed", "diffusers", "lightning", "lightning_fabric", "megatron",
        "nemo", "peft", "pytorch_lightning", "timm", "torch", "torchaudio", "torchdata",
        "torchmetrics", "torchtitan", "torchvision", "transformer_engine", "transformers", "trl",
    )
)  # fmt: skip
_DEPTH = 2
_SIBLINGS = 8
_LARGEST_PARSED_CHARACTERS = 200_000
_MAIN_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")


def should_hold_first_cycle(command: WorkerCommand, prewarm_imports: tuple[str, ...] = ()) -> bool:
    """Return whether the entry file is certain to import what prewarmed workers import."""
    path = entry_file(command) if command.is_python else None
    if path is None:
        return False
    heavy = IMPORTS_TORCH | {name.partition(".")[0] for name in prewarm_imports}
    return _imports_any(path, heavy - {"numpy", "sympy"}, _DEPTH)


def _imports_any(path: str, heavy: frozenset[str] | set[str], depth: int) -> bool:
    text = read_text(path)
    # What is too large to be parsed in some milliseconds is left at that.
    if text is None or "import" not in text or len(text) > _LARGEST_PARSED_CHARACTERS:
        return False
    names = list(_certain_imports(text))
    if any(name.partition(".")[0] in heavy for name in names):
        return True
    if depth == 0:
        return False
    folder = os.path.dirname(path)
    siblings = [os.path.join(folder, *name.split(".")) + ".py" for name in names if name]
    found = [path for path in siblings if os.path.isfile(path)][:_SIBLINGS]
    return any(_imports_any(sibling, heavy, depth - 1) for sibling in found)


def _certain_imports(text: str) -> Iterator[str]:
    import ast

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    main_guards = [ast.dump(ast.parse(text, mode="eval").body) for text in _MAIN_GUARDS]
    todo: list[ast.stmt] = list(reversed(tree.body))
    while todo:
        statement = todo.pop()
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield (statement.module or "") if statement.level <= 1 else ""
        elif isinstance(statement, (ast.Try, ast.With)) or (
            isinstance(statement, ast.If)
            and isinstance(statement.test, ast.Compare)
            and ast.dump(statement.test) in main_guards
        ):
            todo.extend(reversed(statement.body))
