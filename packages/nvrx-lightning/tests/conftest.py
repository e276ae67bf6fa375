# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests of nvrx-lightning."""

import contextlib
import os

import leftovers
import ports
import pytest

leftovers.open_pipe_of_libuv()
_leaves_nothing_behind = leftovers.guard(leftovers.children, leftovers.shared_memory)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide the variables of schedulers and launchers that this machine may have set."""
    prefixes = ("SLURM", "NVRX_", "FT_", "FAULT_TOL_", "TORCHELASTIC_")
    names = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    for name in list(os.environ):
        if name in names or name.startswith(prefixes):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def one_rank(clean_environment):
    """Let a trainer make a process group of one rank, and end that."""
    import torch

    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    with contextlib.ExitStack() as stack:
        values["MASTER_PORT"] = stack.enter_context(ports.claimed())
        for name, value in values.items():
            clean_environment.setenv(name, str(value))
        yield
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
