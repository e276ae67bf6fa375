# SPDX-License-Identifier: Apache-2.0
"""Output as an object of the user's says: torch's `LogsSpecs`, made from an entry point or given.

For each cycle the object turns the workers' environments into paths, and may add to these. All of
it has a place in `WorkerOutput`, but for a console copy of a file that is not the stream's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvidia_resiliency_ext.fault_tolerance import _env
from nvidia_resiliency_ext.shared_utils.errors import NvrxError

from .output import Filter, Stream, Target, WorkerOutput

GROUP = "torchrun.logs_specs"


def load_specs(
    name: str,
    *,
    log_dir: str | None,
    redirects: Mapping[int, int],
    tee: Mapping[int, int],
    local_ranks_filter: frozenset[int] | None,
) -> Any:
    """Return the specification that an entry point makes, called as torchrun calls it.

    Imports torch. Raises ValueError: there is no such entry point, or it does not make one.
    """
    from importlib.metadata import entry_points

    flag = f"--logs-specs {name}"
    found = list(entry_points(group=GROUP, name=name))
    if not found:
        names = ", ".join(sorted(entry_points(group=GROUP).names)) or "none"
        raise ValueError(
            f"{flag}: no entry point of this name in group {GROUP}; there are: {names}"
        )
    from torch.distributed.elastic.multiprocessing import Std as TorchStd

    def as_torch(streams: Mapping[int, int]) -> Any:
        if len(set(streams.values())) <= 1:
            return TorchStd(next(iter(streams.values()), 0))
        return {rank: TorchStd(value) for rank, value in streams.items()}

    try:
        specs = found[0].load()(
            log_dir=log_dir,
            redirects=as_torch(redirects),
            tee=as_torch(tee),
            local_ranks_filter=None if local_ranks_filter is None else set(local_ranks_filter),
        )
    except Exception as error:
        raise ValueError(f"{flag}: {type(error).__name__}: {error}") from error
    if not callable(getattr(specs, "reify", None)):
        raise ValueError(f"{flag}: makes a {type(specs).__name__}, which is no LogsSpecs")  # noqa: TRY004 - as all that is wrong
    return specs


@dataclass(frozen=True, slots=True)
class OutputSpecs:
    """The user's object that decides where output goes; `filters` are `OutputSettings`'."""

    specs: Any  # torch's `LogsSpecs`, of which `reify` is needed
    filters: Mapping[Stream, tuple[str, ...]]

    def outputs(
        self, envs: Sequence[Mapping[str, str]], error_files: Sequence[str]
    ) -> list[tuple[WorkerOutput, dict[str, str]]]:
        """Return the output and the environment of each worker of a cycle, by local rank."""
        given: dict[int, dict[str, Any]] = {rank: dict(env) for rank, env in enumerate(envs)}
        name = type(self.specs).__name__
        try:
            dest = self.specs.reify(given)
        except Exception as error:
            what = f"log specification {name}: {type(error).__name__}: {error}"
            raise NvrxError(what) from error
        outputs = []
        for rank, error_file in enumerate(error_files):
            try:
                env = {key: str(value) for key, value in given[rank].items() if value is not None}
                output = WorkerOutput(
                    self._target(dest, Stream.STDOUT, rank),
                    self._target(dest, Stream.STDERR, rank),
                    env.get(_env.ERROR_FILE, error_file),
                )
            except (KeyError, AttributeError, TypeError) as error:
                what = f"log specification {name}: no {error} for local rank {rank}"
                raise NvrxError(what) from error
            outputs.append((output, env))
        return outputs

    def _target(self, dest: Any, stream: Stream, rank: int) -> Target:
        path = os.fspath(getattr(dest, f"{stream.value}s")[rank])
        copied = os.fspath(getattr(dest, f"tee_{stream.value}s").get(rank, ""))
        if copied in ("", os.devnull):
            return Target(path or None)
        if copied != path:
            raise NvrxError(
                f"log specification {type(self.specs).__name__}: {stream.value} of local rank "
                f"{rank} goes to {path or 'the console'!r} and {copied!r} is copied to the console;"
                " ft_launcher copies only the file that it writes"
            )
        texts = self.filters.get(stream, ())
        if not texts:
            return Target(path, tee=True)
        # Where later versions of torch have it; 2.4 has no such name.
        name = f"filtered_{stream.value}"
        usual = os.path.join(os.path.dirname(os.path.dirname(path)), f"{name}.log")
        copy = os.fspath(getattr(dest, name, usual))
        return Target(path, tee=True, filter=Filter(copy, texts) if copy else None)
