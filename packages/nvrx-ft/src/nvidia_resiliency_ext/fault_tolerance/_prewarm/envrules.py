# SPDX-License-Identifier: Apache-2.0
"""Which environment variables are read when the interpreter starts or a module is imported.

A value that differs by rank, or that the script sets before its first import, does not reach
modules that were imported ahead. The rules go by prefix: torch adds names with every release.
What a variable does is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

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
    "FAKE_ALLOW_META",
    "GLIBC_TUNABLES",
    "KINETO_USE_DAEMON",
    "LANG",
    "LANGUAGE",
    "LOG_TLPARSE",
    "UNSAFE_SKIP_FSDP_MODULE_GUARDS",
)
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
    """Return the rules as the start-up hook of a standby takes them."""
    return {
        "names": list(IMPORT_TIME_NAMES),
        "prefixes": list(IMPORT_TIME_PREFIXES),
        "late": list(LATE_NAMES),
        "late_prefixes": list(LATE_PREFIXES),
    }
