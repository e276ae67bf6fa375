# SPDX-License-Identifier: Apache-2.0
"""Why a worker must be started cold, and what a prewarmed worker imports; it starts nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.shared_utils import procfs
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

if TYPE_CHECKING:
    from .command import WorkerCommand

IMPORT_TIME_PREFIXES = (
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
)  # fmt: skip
IMPORT_TIME_NAMES = (
    "FAKE_ALLOW_META", "GLIBC_TUNABLES", "KINETO_USE_DAEMON", "LANG", "LANGUAGE", "LOG_TLPARSE",
    "UNSAFE_SKIP_FSDP_MODULE_GUARDS",
)  # fmt: skip

# Read when they are needed, although a prefix above covers them.
LATE_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_")
LATE_NAMES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_VERBOSE",
    "ONEDNN_MAX_CPU_ISA",
    # The launcher's own way to choose the interpreter, read before there is one.
    "PYTHON_EXEC",
    # Set by Lightning when it is imported, after torch; torch reads it at each call.
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_DIST_INIT_BARRIER",
)
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")


def is_import_time(name: str) -> bool:
    """Return whether a value set after the imports would be lost."""
    if name in LATE_NAMES or name.startswith(LATE_PREFIXES):
        return False
    return name in IMPORT_TIME_NAMES or name.startswith(IMPORT_TIME_PREFIXES)


def changed_import_time(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the import-time variables that differ between two environments, sorted."""
    names = {*old, *new}
    return sorted(n for n in names if old.get(n) != new.get(n) and is_import_time(n))


def set_in_text(text: str) -> str | None:
    """Return the first import-time variable that a script's text seems to set, or None.

    It is a plain search of lines that speak of the environment. Reading a variable there looks
    the same as setting it; that costs a warm start, and the other mistake would cost the value.
    """
    for line in _environment_lines(text):
        for name in _NAME.findall(line):
            if is_import_time(name):
                return str(name)
    return None


def _environment_lines(text: str) -> Iterable[str]:
    """Yield the lines that name the environment, each with the two that follow it.

    A call such as `os.environ.update({...})` names its variables on the lines after its own.
    """
    lines = text.splitlines()
    for number, line in enumerate(lines):
        code = line.lstrip()
        if not code.startswith("#") and ("environ" in code or "putenv" in code):
            yield "\n".join(lines[number : number + 3])


def watch_list() -> dict[str, list[str]]:
    """Return the rules as the start-up hook of a prewarmed worker takes them."""
    return {
        "names": list(IMPORT_TIME_NAMES),
        "prefixes": list(IMPORT_TIME_PREFIXES),
        "late": list(LATE_NAMES),
        "late_prefixes": list(LATE_PREFIXES),
    }


# Flags after which the hook is off, or which show the user what the interpreter imports.
_LOOKING_FLAGS = frozenset("EISiv")
_FLAGS_WITH_VALUE = frozenset("WX")
_LOOKING_OPTIONS = ("importtime", "tracemalloc")
_LOOKING_VARIABLES = (
    "PYTHONINSPECT",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONTRACEMALLOC",
    "PYTHONVERBOSE",
)
_LARGEST_ENTRY_BYTES = 4 << 20
_LIBTORCH = "libtorch_cpu"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The interpreter in a command line: what comes before the entry, and what kind that is."""

    flags: tuple[str, ...]
    entry_kind: str


def cold_reason(
    command: WorkerCommand,
    env: Mapping[str, str],
    local_envs: Sequence[Mapping[str, str]],
    prewarm: str,
) -> str | None:
    """Return why workers of this command must start cold, or None; `prewarm` is the option."""
    if prewarm == "off":
        return "--ft-prewarm off"
    return (
        _command_reason(command)
        or _environment_reason(env)
        or _entry_reason(command)
        or _rank_reason(env, local_envs)
    )


def go_reason(prewarmed_env: Mapping[str, str], worker_env: Mapping[str, str]) -> str | None:
    """Return why a prewarmed worker cannot take over a worker's environment, or None."""
    changed = changed_import_time(prewarmed_env, worker_env)
    if changed:
        return f"{changed[0]} is read at import and differs from the standby's"
    return None


def _command_reason(command: WorkerCommand) -> str | None:
    if not command.is_python:
        return "the command is not a Python script or module"
    interpreter = find_interpreter(command.argv)
    if interpreter is None:
        return f"the workers' interpreter is not {sys.executable}"
    if interpreter.entry_kind == "code":
        return "the command is not a Python script or module"
    for flag in interpreter.flags:
        if flag.startswith("-X"):
            if flag[2:].strip().partition("=")[0] in _LOOKING_OPTIONS:
                return f"the interpreter's flag {flag}"
        elif not flag.startswith(("--", "-W")) and _LOOKING_FLAGS & set(flag):
            return f"the interpreter's flag {flag}"
    return None


def _environment_reason(env: Mapping[str, str]) -> str | None:
    executable = env.get("PYTHON_EXEC")
    if executable and not _is_this_python(executable):
        return f"PYTHON_EXEC={executable} is not {sys.executable}"
    for name in _LOOKING_VARIABLES:
        if env.get(name):
            return f"{name} is set"
    if os.pathsep in os.path.dirname(__file__):
        return "the installation folder has a colon in its name"
    return None


def _entry_reason(command: WorkerCommand) -> str | None:
    text = _entry_text(command)
    name = set_in_text(text) if text is not None else None
    if name is not None:
        return f"{command.entry} names {name}, which is read at import"
    return None


def _rank_reason(env: Mapping[str, str], local_envs: Sequence[Mapping[str, str]]) -> str | None:
    for local_env in local_envs:
        reason = go_reason(env, local_env)
        if reason is not None:
            return reason
    return None


def find_interpreter(argv: Sequence[str]) -> Interpreter | None:
    """Return how a command line runs this Python, or None when it does not.

    The entry kind is `script`, `module` or `code` (`-c`, `-` or no entry).
    """
    index = next((i for i, word in enumerate(argv) if _is_this_python(word)), None)
    if index is None:
        return None
    flags: list[str] = []
    words = iter(argv[index + 1 :])
    for word in words:
        if word == "-" or not word.startswith("-"):
            return Interpreter(tuple(flags), "code" if word == "-" else "script")
        if word.startswith("--"):
            flags.append(word)
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        position = next(
            (i for i, c in enumerate(word) if c in "cm" or c in _FLAGS_WITH_VALUE), None
        )
        if position is None:
            flags.append(word)
            continue
        if position > 1:
            flags.append(word[:position])
        if word[position] in "cm":
            return Interpreter(tuple(flags), "module" if word[position] == "m" else "code")
        value = word[position + 1 :] or next(words, "")
        flags.append(f"-{word[position]}{value}")
    return Interpreter(tuple(flags), "code")


def _is_this_python(word: str) -> bool:
    if word == sys.executable:
        return True
    # Another link to the same file can belong to another virtual environment.
    same_folder = os.path.dirname(word) == os.path.dirname(sys.executable)
    return same_folder and os.path.realpath(word) == os.path.realpath(sys.executable)


def _entry_text(command: WorkerCommand) -> str | None:
    path = module_file(command.entry) if command.is_module else command.entry
    if path is not None and os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    return None if path is None else read_text(path)


def module_file(name: str) -> str | None:
    """Return the source file that `-m name` runs, without importing anything.

    Only plain files in the working directory and on this interpreter's path are found.
    """
    parts = name.split(".")
    for folder in ["", *sys.path]:
        base = os.path.join(folder, *parts)
        for path in (f"{base}.py", os.path.join(base, "__main__.py")):
            if os.path.isfile(path):
                return path
    return None


def read_text(path: str) -> str | None:
    """Return the text of a source file, or None for what is no readable file of sane size."""
    try:
        # A script may come through a pipe; what is read here would be missing there.
        data = read_regular_file(path, _LARGEST_ENTRY_BYTES + 1, follows_symlink=True)
    except OSError:
        return None
    return data.decode("utf-8", "replace") if len(data) <= _LARGEST_ENTRY_BYTES else None


def wants_prewarming(worker_pids: Iterable[int]) -> bool:
    """Return whether any of the workers has libtorch mapped: only then does prewarming help."""
    return any(procfs.maps_name(pid, _LIBTORCH) for pid in worker_pids)


# In this order: between two entries a prewarmed worker looks whether "go" is there already, and a
# script gets each entry with those before it when it first imports something of it. `torch._dynamo`
# is what DistributedDataParallel imports when the first model is wrapped (some 820 modules with
# sympy, half of a restart), `_cupti_monitor` what the first backward pass adds. Any but torch may
# be missing in the installed versions.
# Ours are what a rank needs until its session with the monitor stands: 60 ms of CPU, in the demo
# more than all else that a restarted rank does. None of them imports torch.
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


def should_hold_first_cycle(command: WorkerCommand, prewarm_imports: tuple[str, ...] = ()) -> bool:
    """Return whether the entry file is certain to import what prewarmed workers import."""
    if not command.is_python:
        return False
    path = module_file(command.entry) if command.is_module else command.entry
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
    todo: list[ast.stmt] = list(reversed(tree.body))
    while todo:
        statement = todo.pop()
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield (statement.module or "") if statement.level <= 1 else ""
        elif isinstance(statement, (ast.Try, ast.With)) or (
            isinstance(statement, ast.If) and _is_main_guard(statement.test)
        ):
            todo.extend(reversed(statement.body))


def _is_main_guard(test: object) -> bool:
    import ast

    if not isinstance(test, ast.Compare) or len(test.comparators) != 1:
        return False
    sides = (test.left, test.comparators[0])
    has_name = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    has_main = any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)
    return has_name and has_main and isinstance(test.ops[0], ast.Eq)
