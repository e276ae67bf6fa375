# SPDX-License-Identifier: Apache-2.0
"""The health checks of a node before it joins, as a rendezvous configuration asks for them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from nvidia_resiliency_ext.fault_tolerance._config.settings import FaultToleranceConfig
from nvidia_resiliency_ext.fault_tolerance._launch.errors import UnhealthyNodeException
from nvidia_resiliency_ext.fault_tolerance._launch.fitness import NodeChecks, unfit
from nvidia_resiliency_ext.fault_tolerance.rdzv_utils import rdzv_config_get_as_bool


def node_check(conf: Mapping[str, Any]) -> Callable[[], None]:
    """Return what raises `UnhealthyNodeException` where this node must not join.

    Settings: `enable_nic_healthcheck`, `link_state_path_template`,
    `enable_dist_storage_healthcheck`, `storage_healthcheck_paths` and `segment_health_check_dir`;
    those left out have the launcher's defaults.

    Raises:
        ValueError: a setting has an unusable value.
    """
    given: dict[str, Any] = {
        name: rdzv_config_get_as_bool(conf, name)
        for name in ("enable_nic_healthcheck", "enable_dist_storage_healthcheck")
    }
    for name in ("link_state_path_template", "segment_health_check_dir"):
        given[name] = conf.get(name)
    paths = conf.get("storage_healthcheck_paths")
    given["storage_healthcheck_path"] = paths if isinstance(paths, str) else ",".join(paths or ())
    wanted = {name: value for name, value in given.items() if value not in (None, "")}
    checks = NodeChecks(FaultToleranceConfig.from_kwargs(**wanted), None, os.environ)

    def check() -> None:
        cause = unfit(checks.run(), socket.gethostname())
        if cause is not None:
            raise UnhealthyNodeException(cause.what)

    return check
