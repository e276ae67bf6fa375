# SPDX-License-Identifier: Apache-2.0
"""What standby workers import when the user names nothing; it imports none of it."""

from __future__ import annotations

from collections.abc import Sequence

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
