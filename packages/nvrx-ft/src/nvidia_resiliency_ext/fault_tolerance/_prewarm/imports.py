# SPDX-License-Identifier: Apache-2.0
"""What standby workers import, and whether the first cycle gains from them.

A script that imports torch only in some of its modes, or never, must not pay for it. So an import
counts when it is certain to run: at the top level of the file, in `with`, in the body of `try` or
under `if __name__ == "__main__":`, but not inside another `if`, a loop or a function.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from .conditions import Command, module_file, read_text

# In this order: between two entries a standby looks whether "go" is there already, and a script
# gets each entry with those before it when it first imports something of it. `torch._dynamo` is
# what DistributedDataParallel imports when the first model is wrapped (some 820 modules with
# sympy, half of a restart), `_cupti_monitor` what the first backward pass adds. Any but torch may
# be missing in the installed versions.
# Ours are what a rank needs until its session with the monitor stands: 60 ms of CPU, in the demo
# more than all else that a restarted rank does. None of them imports torch.
DEFAULT_IMPORTS = (
    "numpy",
    "nvidia_resiliency_ext.fault_tolerance.rank_monitor_client",
    "nvidia_resiliency_ext.fault_tolerance.config",
    "nvidia_resiliency_ext.fault_tolerance.ipc_connector",
    "nvidia_resiliency_ext.fault_tolerance.timeouts_calc",
    "nvidia_resiliency_ext.fault_tolerance._monitor.link",
    "nvidia_resiliency_ext.shared_utils.events",
    "torch",
    "torch.distributed",
    "torch.profiler._cupti_monitor",
    "sympy",
    "torch._dynamo",
)


def import_list(text: str) -> tuple[str, ...]:
    """Return the modules of a comma-separated list; the default list when it names none."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    return names or DEFAULT_IMPORTS


def with_optional(names: Sequence[str]) -> list[tuple[str, bool]]:
    """Return each name with whether a standby may go on when there is no such module."""
    return [(name, name in DEFAULT_IMPORTS and name != "torch") for name in names]


IMPORTS_TORCH = frozenset(
    (
        "accelerate",
        "apex",
        "deepspeed",
        "diffusers",
        "lightning",
        "lightning_fabric",
        "megatron",
        "nemo",
        "peft",
        "pytorch_lightning",
        "timm",
        "torch",
        "torchaudio",
        "torchdata",
        "torchmetrics",
        "torchtitan",
        "torchvision",
        "transformer_engine",
        "transformers",
        "trl",
    )
)
_DEPTH = 2
_SIBLINGS = 8
_LARGEST_PARSED_CHARACTERS = 200_000


def should_hold_first_cycle(command: Command, prewarm_imports: tuple[str, ...] = ()) -> bool:
    """Return whether the entry file is certain to import what standbys import.

    Args:
        command: The workers' command.
        prewarm_imports: Modules that standbys import; those beside torch count as well.
    """
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
    known = [path for path in siblings if os.path.isfile(path)][:_SIBLINGS]
    return any(_imports_any(sibling, heavy, depth - 1) for sibling in known)


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
