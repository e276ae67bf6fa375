# SPDX-License-Identifier: Apache-2.0
"""Public names of a module that are loaded from other modules when first used."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    namespace: dict[str, Any], homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose public names stand elsewhere.

    A loaded name stays in the module. Type checkers need an import under `TYPE_CHECKING`, too.

    Args:
        namespace: The module's `globals()`, with `__all__`; its names without a home are modules.
        homes: Names by the module that has them, relative to the module's package.

    Example:
        >>> __all__ = ["format_ranks"]
        >>> namespace = {"__all__": __all__, "__name__": "x", "__package__": __package__}
        >>> get, _ = lazy_names(namespace, {"rank_sets": ["format_ranks"]})
        >>> get("format_ranks")([0, 1, 2])
        '0-2'
    """
    # By the package: under `python -m` a module is called __main__.
    package = namespace["__package__"]
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> Any:
        from importlib import import_module

        home = home_of.get(name)
        if home is None and name not in namespace["__all__"]:
            text = f"module {namespace['__name__']!r} has no attribute {name!r}"
            raise AttributeError(text, name=name)
        module = import_module(f".{home or name}", package)
        value = namespace[name] = module if home is None else getattr(module, name)
        return value

    def names() -> list[str]:
        return sorted({*namespace, *namespace["__all__"]} - {"TYPE_CHECKING", "lazy_names"})

    return load, names
