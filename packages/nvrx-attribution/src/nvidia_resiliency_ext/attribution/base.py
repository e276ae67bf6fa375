# SPDX-License-Identifier: Apache-2.0
"""The three-step pipeline that every analysis has: read input, attribute, hand the result out.

A step may be a function or a coroutine function. Arguments of a run travel in a context variable,
so two runs at the same time each see their own.
"""

from __future__ import annotations

import argparse
import contextvars
import enum
import inspect
import itertools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

__all__ = [
    "AttributionState",
    "NVRxAttribution",
    "current_attribution_run_args",
    "effective_run_or_init_config",
    "merged_attribution_config",
    "normalize_attribution_args",
    "peek_attribution_run_args",
]

T = TypeVar("T")
R = TypeVar("R")

_STEPS = ("preprocess_input", "attribution", "output_handler")
_POOL_THREADS = 4
_PAIR = 2

_run_args: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "nvrx_attribution_run_args", default=None
)


class AttributionState(enum.Enum):
    """Whether the job should be stopped."""

    STOP = enum.auto()
    CONTINUE = enum.auto()


def normalize_attribution_args(args: Any) -> dict[str, Any]:
    """Return run arguments as a new dictionary.

    Args:
        args: A namespace, a mapping, two results as a list or tuple (they become `input_data`),
            or any object with attributes.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(args, Mapping):
        return dict(args)
    if isinstance(args, argparse.Namespace):
        return dict(vars(args))
    if isinstance(args, list | tuple):
        if len(args) == _PAIR:
            return {"input_data": list(args)}
        raise TypeError(f"a sequence of arguments has two results, not {len(args)}")
    if hasattr(args, "__dict__") and not isinstance(args, type):
        return dict(vars(args))
    raise TypeError(f"cannot take run arguments from a {type(args).__name__}")


def peek_attribution_run_args() -> dict[str, Any] | None:
    """Return the arguments of the run that this code belongs to, or None outside of a run."""
    return _run_args.get()


def current_attribution_run_args() -> dict[str, Any]:
    """Return the arguments of the run that this code belongs to.

    Raises:
        RuntimeError: No run is active in this context.
    """
    found = _run_args.get()
    if found is None:
        raise RuntimeError("no attribution run is active here; call run() or run_sync()")
    return found


def effective_run_or_init_config(init: Mapping[str, Any]) -> dict[str, Any]:
    """Return the active run's arguments; without a run, a copy of the construction's.

    Args:
        init: The arguments of the construction.
    """
    found = _run_args.get()
    return dict(init) if found is None else found


def merged_attribution_config(init: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the construction, overridden by the active run's.

    Args:
        init: The arguments of the construction.
    """
    return {**init, **(_run_args.get() or {})}


class NVRxAttribution(Generic[T, R]):
    """Run three steps, each a function or a coroutine function, over one set of arguments.

    Args:
        preprocess_input: Takes nothing or the run's arguments; returns what is to be analysed.
        attribution: Takes that; returns a result.
        output_handler: Takes the result; returns (result, `AttributionState`).
        thread_pool: Where plain functions run; default: a pool of four threads, made when needed.

    Raises:
        TypeError: `preprocess_input` takes more than one parameter.
        ValueError: What a step returns is not annotated as what the next one takes.

    Example:
        >>> def count(text: str) -> int: return len(text)
        >>> def show(n: int) -> tuple[int, AttributionState]: return n, AttributionState.CONTINUE
        >>> with NVRxAttribution(lambda args: args["text"], count, show) as pipeline:
        ...     pipeline.run_sync({"text": "abc"})
        (3, <AttributionState.CONTINUE: 2>)
    """

    _loops = threading.local()

    def __init__(
        self,
        preprocess_input: Callable[..., Any],
        attribution: Callable[..., Any],
        output_handler: Callable[..., Any],
        thread_pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self._pool = thread_pool
        self._owns_pool = thread_pool is None
        self._pool_lock = threading.Lock()
        self.register_attr_pipeline(
            {
                "preprocess_input": preprocess_input,
                "attribution": attribution,
                "output_handler": output_handler,
            }
        )

    def register_attr_pipeline(self, attr_pipeline: Mapping[str, Callable[..., Any]]) -> None:
        """Replace the three steps, after the same checks as at construction.

        Args:
            attr_pipeline: `preprocess_input`, `attribution` and `output_handler`: functions or
                coroutines.

        Raises:
            ValueError: A step is missing, or the annotations of two steps do not fit.
            TypeError: `preprocess_input` takes more than one parameter.
        """
        missing = [name for name in _STEPS if name not in attr_pipeline]
        if missing:
            raise ValueError(f"the pipeline lacks {', '.join(missing)}")
        if len(_positional(attr_pipeline["preprocess_input"])) > 1:
            raise TypeError("preprocess_input takes no parameter, or the run's arguments")
        self.inspect_type_consistency(attr_pipeline)
        self._steps = {name: attr_pipeline[name] for name in _STEPS}

    def inspect_type_consistency(self, attr_pipeline: Mapping[str, Callable[..., Any]]) -> None:
        """Compare the annotated result of each step with the parameter of the next.

        Args:
            attr_pipeline: The three steps by name.

        Raises:
            ValueError: They differ; steps without annotations fit anything.
        """
        for first, second in itertools.pairwise(_STEPS):
            returned = _signature(attr_pipeline[first]).return_annotation
            parameters = _positional(attr_pipeline[second])
            if not parameters:
                continue
            taken = parameters[0].annotation
            empty = inspect.Signature.empty
            if returned is empty or taken is empty or Any in (returned, taken):
                continue
            if isinstance(returned, str) != isinstance(taken, str):
                continue  # one of them names a type that cannot be looked up
            if returned != taken:
                raise ValueError(f"{first} returns {returned}, but {second} takes {taken}")

    async def run(self, args: Any) -> tuple[R, AttributionState]:
        """Run the three steps and return (result, state).

        Args:
            args: The run's arguments: a mapping or an object with attributes.
        """
        token = _run_args.set(normalize_attribution_args(args))
        try:
            step = self._steps["preprocess_input"]
            given = (current_attribution_run_args(),) if _positional(step) else ()
            found = await self._call(step, *given)
            result = await self.do_attribution(found)
            handled: tuple[R, AttributionState] = await self.output_handler(result)
            return handled
        finally:
            _run_args.reset(token)

    def run_sync(self, args: Any) -> tuple[R, AttributionState]:
        """Run the three steps from code that has no event loop.

        Args:
            args: The run's arguments: a mapping or an object with attributes.

        Raises:
            RuntimeError: An event loop runs in this thread already; await `run` there.
        """
        import asyncio

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass  # errors of the steps are not to be told as consequences of this one
        else:
            raise RuntimeError("an event loop runs in this thread; use 'await run(args)' instead")
        return self.get_shared_loop().run_until_complete(self.run(args))

    async def do_attribution(self, data: T) -> Any:
        """Run the middle step.

        Args:
            data: The result of the first step.
        """
        return await self._call(self._steps["attribution"], data)

    async def output_handler(self, result: Any) -> Any:
        """Run the last step.

        Args:
            result: The result of the middle step.
        """
        return await self._call(self._steps["output_handler"], result)

    @classmethod
    def get_shared_loop(cls) -> asyncio.AbstractEventLoop:
        """Return this thread's event loop; make it at first."""
        import asyncio

        loop: asyncio.AbstractEventLoop | None = getattr(cls._loops, "loop", None)
        if loop is None or loop.is_closed():
            loop = cls._loops.loop = asyncio.new_event_loop()
        return loop

    @classmethod
    def reset_thread_event_loop(cls) -> None:
        """Close this thread's event loop; the next `run_sync` makes another."""
        loop: asyncio.AbstractEventLoop | None = getattr(cls._loops, "loop", None)
        cls._loops.loop = None
        if loop is not None and not loop.is_closed():
            loop.close()

    def close(self) -> None:
        """End the threads, unless the pool was given; harmless when repeated."""
        with self._pool_lock:
            pool, self._pool = (self._pool, None) if self._owns_pool else (None, self._pool)
        if pool is not None:
            pool.shutdown()

    def __enter__(self) -> NVRxAttribution[T, R]:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pipeline."""
        self.close()

    async def _call(self, step: Callable[..., Any], *args: Any) -> Any:
        import asyncio

        if inspect.iscoroutinefunction(step):
            return await step(*args)
        # The pool's threads have a context of their own: the run's arguments go along.
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._threads(), lambda: context.run(step, *args))
        return await result if inspect.isawaitable(result) else result

    def _threads(self) -> ThreadPoolExecutor:
        with self._pool_lock:
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor

                self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="nvrx-attr")
            return self._pool


def _positional(step: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in _signature(step).parameters.values() if p.kind in kinds]


def _signature(step: Callable[..., Any]) -> inspect.Signature:
    """Return a signature whose annotations are types, also where their module postpones them."""
    try:
        return inspect.signature(step, eval_str=True)
    except Exception:  # noqa: BLE001 - names in an annotation can be anything
        return inspect.signature(step)
