# SPDX-License-Identifier: Apache-2.0
"""Replace an attribute of an object, class or module, and put back exactly what was there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["WrappedAttribute"]

_ABSENT: Any = object()


class WrappedAttribute:
    """One attribute with another value in its place, until `restore`.

    Several owners may wrap the same attribute and restore it in any order. A replacement that is no
    longer outermost stays in place when it is restored, so it should look at `is_active` and only
    pass calls on when that is false.

    Example:
        >>> class Trainer:
        ...     def step(self):
        ...         return 1
        >>> trainer = Trainer()
        >>> wrapped = WrappedAttribute(trainer, "step", lambda this: lambda: 2)
        >>> trainer.step(), wrapped.restore(), trainer.step()
        (2, None, 1)

    Args:
        owner: The object, class or module.
        name: The attribute.
        make: Returns the replacement. It is called once, with this object.

    Attributes:
        owner, name: As given.
        original: What was found: of classes the descriptor, such as a `staticmethod`.
        is_active: Whether it was not restored yet.

    Raises:
        AttributeError: There is no such attribute, or it cannot be set.
        TypeError: The attributes of the owner, such as a built-in class, cannot be set.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[WrappedAttribute], Any]) -> None:
        self.owner = owner
        self.name = name
        own = self._own = self._stored()
        self.original: Any = inspect.getattr_static(owner, name) if own is _ABSENT else own
        self.is_active = True
        self._replacement = make(self)
        setattr(owner, name, self._replacement)

    def restore(self) -> None:
        """Restore the original attribute, unless another one replaced ours; once is enough.

        Raises:
            AttributeError: The attribute can no longer be set.
        """
        if not self.is_active:
            return
        self.is_active = False
        if self._stored() is not self._replacement:
            return
        if self._own is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._own)

    def _stored(self) -> Any:
        """Return the owner's own attribute of the name, without those of its classes."""
        if hasattr(self.owner, "__dict__"):
            return vars(self.owner).get(self.name, _ABSENT)
        is_slot = inspect.ismemberdescriptor(inspect.getattr_static(self.owner, self.name))
        return getattr(self.owner, self.name) if is_slot else _ABSENT
