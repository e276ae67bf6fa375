# SPDX-License-Identifier: Apache-2.0
"""A worker's command, counting workers and devices, and the public value types of the launcher."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._config.launch_config import (
    LaunchConfig,
    LogFunnelPorts,
    get_rdzv_endpoint,
    get_use_env,
)
from nvidia_resiliency_ext.fault_tolerance._config.syntax import (
    Std,
    parse_endpoint,
    parse_min_max_nnodes,
    streams_by_rank,
)
from nvidia_resiliency_ext.fault_tolerance._core.local_world import (
    count_gpus,
    determine_local_world_size,
    local_world_size,
)
from nvidia_resiliency_ext.fault_tolerance._workers.command import worker_command
from nvidia_resiliency_ext.fault_tolerance.cli_args import parse_args
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig

ARGUMENTS = ["--out=${local_rank}.txt", "$local_rank", "$$x", "$HOME", "plain", "${other}", "$"]


def test_the_macro_is_replaced_as_torchrun_does() -> None:
    """Arguments of each local rank equal those that torch's own macros give."""
    from torch.distributed.elastic.utils.api import macros

    command = worker_command("s.py", ARGUMENTS, {})
    for local_rank in (0, 3):
        expected = macros.substitute(["-u", "s.py", *ARGUMENTS], str(local_rank))
        assert command.for_local_rank(local_rank) == (sys.executable, *expected)


def test_a_command_without_macro_is_the_same_for_all() -> None:
    """Without a dollar sign every rank has the very same command."""
    command = worker_command("s.py", ["a"], {"PYTHON_EXEC": "/opt/$py"})
    assert command.for_local_rank(0) is command.argv


def test_run_path_runs_the_script_as_main(tmp_path: Path) -> None:
    """`--run-path` gives the script its name and arguments, in an interpreter of ours."""
    script = tmp_path / "job.py"
    script.write_text("import sys; print(__name__, sys.argv, __file__)\n")
    command = worker_command(str(script), ["a", "-m"], {}, is_run_path=True)
    assert command.is_python
    assert command.entry == str(script)
    result = subprocess.run(
        command.for_local_rank(0), capture_output=True, text=True, timeout=150, check=True
    )
    assert result.stdout.split() == ["__main__", f"['{script}',", "'a',", "'-m']", str(script)]


@pytest.mark.parametrize(
    ("nodes", "procs", "visible", "count"),
    [
        (4, 8, None, 4),
        (0, 8, None, 8),
        (0, 0, None, 0),
        (0, 0, "0,1", 0),
        (4, 4, "0,2", 2),
        (4, 4, "", 0),
        (4, 4, "-1", 0),
        (4, 4, "0,-1,1", 1),
        (4, 4, "1,7", 1),
        (4, 4, "GPU-ab,GPU-cd", 2),
        (4, 4, "NoDevFiles", 0),
    ],
)
def test_gpus_are_counted_as_a_worker_sees_them(
    tmp_path: Path, nodes: int, procs: int, visible: str | None, count: int
) -> None:
    """Device nodes, else the driver's list, less what CUDA_VISIBLE_DEVICES hides."""
    (tmp_path / "dev").mkdir()
    for name in ["null", "nvidiactl", "nvidia-uvm", "0", *[f"nvidia{n}" for n in range(nodes)]]:
        (tmp_path / "dev" / name).touch()
    gpus = tmp_path / "proc" / "driver" / "nvidia" / "gpus"
    gpus.mkdir(parents=True)
    for number in range(procs):
        (gpus / f"0000:0{number}:00.0").mkdir()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, str(tmp_path)) == count
    assert local_world_size("auto", environ, str(tmp_path)) == (
        count or len(os.sched_getaffinity(0))
    )
    if count:
        assert local_world_size("gpu", environ, str(tmp_path)) == count
    else:
        with pytest.raises(ValueError, match="no GPU is visible"):
            local_world_size("gpu", environ, str(tmp_path))


def test_workers_are_a_number_or_the_cpus() -> None:
    """A number stands for itself, cpu for the CPUs this process may use; the rest is refused."""
    assert determine_local_world_size("3") == 3
    assert determine_local_world_size("cpu") == len(os.sched_getaffinity(0))
    assert determine_local_world_size("65536") == 65536
    for wrong in ("0", "-1", "65537", "99999999999", "tpu", "", "1.5"):
        with pytest.raises(ValueError, match="workers from 1 to 65536, cpu, gpu or auto"):
            determine_local_world_size(wrong)


@pytest.mark.gpu
def test_gpus_are_counted_as_torch_counts_them() -> None:
    """Without asking the driver we count what torch finds."""
    import torch

    assert determine_local_world_size("gpu") == torch.cuda.device_count()


@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:1", "0:3,1:0,2:1", "1:2,7:3"])
def test_streams_mean_what_torch_says(text: str) -> None:
    """Redirect values are read as torchrun reads them."""
    from torch.distributed.elastic.multiprocessing.api import Std as TorchStd
    from torch.distributed.elastic.multiprocessing.api import to_map

    expected = to_map(TorchStd.from_str(text), 3)
    assert {r: int(s) for r, s in streams_by_rank(text, 3).items()} == {
        r: int(s) for r, s in expected.items()
    }


@pytest.mark.parametrize("text", ["", "4", "x", "0:4", "0:1,0:2", "0:1,", "-1:1", "0:1:2"])
def test_wrong_streams_are_refused(text: str) -> None:
    """Anything else is an error."""
    with pytest.raises(ValueError, match="is neither"):
        streams_by_rank(text, 3)
    assert Std.OUT | Std.ERR == Std.ALL


def test_node_ranges() -> None:
    """`N` and `MIN:MAX` are read; another form raises RuntimeError."""
    assert parse_min_max_nnodes("2") == (2, 2)
    assert parse_min_max_nnodes("1:4") == (1, 4)
    for wrong in ("", "a", "1:2:3", "1-2", "-1", "1:"):
        with pytest.raises(RuntimeError, match="neither"):
            parse_min_max_nnodes(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h", ("h", None)),
        ("h:1", ("h", 1)),
        ("[::1]:5", ("::1", 5)),
        ("[::1]", ("::1", None)),
    ],
)
def test_endpoints(text: str, expected: tuple[str, int | None]) -> None:
    """Host, port and bracketed IPv6 are told apart."""
    assert parse_endpoint(text) == expected


def test_the_endpoint_defaults_to_the_master() -> None:
    """Without an endpoint nodes meet at the master's address and port."""
    assert get_rdzv_endpoint(parse_args(["--master-addr=h", "--master-port=7", "s"])) == "h:7"
    assert get_rdzv_endpoint(parse_args(["--rdzv-endpoint=e:1", "s"])) == "e:1"
    assert get_use_env(argparse.Namespace())
    assert not get_use_env(argparse.Namespace(use_env=False))


def test_a_launch_config_fills_in_the_rendezvous() -> None:
    """Settings left out have their defaults; given ones stay; a timeout of its own wins."""
    given = {"join_timeout": 1}
    config = LaunchConfig(1, 2, 4, FaultToleranceConfig(), rdzv_configs=given, rdzv_timeout=7)
    assert config.rdzv_configs == {
        "timeout": 7,
        "join_timeout": 1,
        "last_call_timeout": 1,
        "close_timeout": 30,
        "read_timeout": 60,
        "store_connect_wait_seconds": 120,
    }
    assert given == {"join_timeout": 1}
    assert LaunchConfig(1, 1, 1, FaultToleranceConfig()).rdzv_configs["timeout"] == 900


def test_log_servers_have_neighbouring_ports(clean_environment: pytest.MonkeyPatch) -> None:
    """One server up to 1536 nodes; beyond, leaves first and the root on the port after them."""
    one = LogFunnelPorts.from_launcher_args(parse_args(["--nnodes=1536", "s"]))
    assert (one.uses_two_level, one.listen_ports()) == (False, (50051,))
    assert one.client_connect_port() == one.root_listen_port == 50051
    two = LogFunnelPorts.from_launcher_args(parse_args(["--nnodes=1:1537", "s"]))
    assert (two.uses_two_level, two.listen_ports()) == (True, (50051, 50052, 50053))
    assert two.root_listen_port == 50053
    clean_environment.setenv("SLURM_PROCID", "3")
    assert two.client_connect_port() == two.leaf_listen_port(1) == 50052
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="is not one of 2"):
            two.leaf_listen_port(wrong)
    given = parse_args(["--ft-log-server-port=65535", "--ft-log-aggregator-count=2", "s"])
    with pytest.raises(ValueError, match="not within 1 to 65535"):
        LogFunnelPorts.from_launcher_args(given)
