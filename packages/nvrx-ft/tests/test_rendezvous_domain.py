# SPDX-License-Identifier: Apache-2.0
"""The NVLink domain of a node, from a stand-in for `nvidia-smi` first on PATH."""

import os
import time

import pytest
from monitored_ranks import wait_until

from nvidia_resiliency_ext.fault_tolerance._rendezvous.domain import (
    NvlinkDomainError,
    nvlink_domain,
)
from nvidia_resiliency_ext.shared_utils.procfs import running_in_groups

DOMAIN = "9c6f5af3-53bf-49b5-a436-b66766c413c3"
OTHER = "11111111-53bf-49b5-a436-b66766c413c3"
ZEROS = "00000000-0000-0000-0000-000000000000"


def gpu(uuid):
    return f"""GPU 00000008:01:00.0
    Product Name                          : NVIDIA GB200
    GPU UUID                              : GPU-24fb92fc-15ec-deff-a5c1-82b48e063f59
    Fabric
        State                             : Completed
        Status                            : Success
        CliqueId                          : 4026
        ClusterUUID                       : {uuid}
        Health
            Bandwidth                     : N/A
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that puts a script in the place of nvidia-smi."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    def install(script):
        path = tools / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def install_report(*uuids):
        (tmp_path / "report").write_text("\n".join(gpu(uuid) for uuid in uuids))
        install(f'[ "$*" = "-q" ] && exec cat {tmp_path}/report')

    install.report = install_report
    return install


def test_all_gpus_in_one_domain(nvidia_smi):
    """The one ClusterUUID of the node's GPUs is its domain, in one spelling."""
    nvidia_smi.report(DOMAIN, DOMAIN.upper(), "N/A")
    assert nvlink_domain() == DOMAIN


def test_a_report_larger_than_a_pipe(nvidia_smi):
    """A report that does not fit into a pipe's buffer is read whole."""
    nvidia_smi.report(DOMAIN, *["N/A"] * 2000)
    assert nvlink_domain() == DOMAIN


@pytest.mark.parametrize(
    ("uuids", "message"),
    [
        ((), "shows no ClusterUUID of an NVLink domain: check the fabric"),
        (("N/A", "N/A"), r"no ClusterUUID of an NVLink domain \(only N/A\)"),
        ((ZEROS, ZEROS), rf"no ClusterUUID of an NVLink domain \(only {ZEROS}\)"),
        ((DOMAIN, OTHER), f"in several NVLink domains \\({OTHER}, {DOMAIN}\\)"),
        (("x" * 900,), r"no ClusterUUID of an NVLink domain \(only x{200}\)"),
    ],
)
def test_no_domain_or_several(nvidia_smi, uuids, message):
    """GPUs outside a fabric and GPUs of two are an error that says so, with the remedy."""
    nvidia_smi.report(*uuids)
    with pytest.raises(RuntimeError, match=message) as caught:
        nvlink_domain()
    assert "start without --ft-segment" in str(caught.value)


def test_a_failing_nvidia_smi(nvidia_smi):
    """Its exit code is told, even if it printed a domain."""
    nvidia_smi(f"echo 'ClusterUUID : {DOMAIN}'; exit 9")
    with pytest.raises(NvlinkDomainError, match="nvidia-smi -q ended with exit code 9"):
        nvlink_domain()


def test_no_nvidia_smi(tmp_path, monkeypatch):
    """Its absence is a RuntimeError that names the remedy."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"nvidia-smi cannot be run: .*install the driver"):
        nvlink_domain()


@pytest.mark.parametrize("script", ["sleep 600", "exec >&-; sleep 600"])
def test_an_nvidia_smi_that_does_not_end(nvidia_smi, script, tmp_path):
    """It is killed at the deadline, with everything that it started."""
    nvidia_smi(f"echo $$ > {tmp_path}/pid; {script}")
    start = time.monotonic()
    with pytest.raises(NvlinkDomainError, match=r"came to no end within 0\.5 s"):
        nvlink_domain(timeout_s=0.5)
    assert time.monotonic() - start < 20
    group = int((tmp_path / "pid").read_text())
    wait_until(lambda: not running_in_groups([group]))


def test_an_nvidia_smi_that_prints_without_end(nvidia_smi):
    """The kernel ends it when its report is larger than any real one, long before its time."""
    nvidia_smi("exec yes ClusterUUID")
    with pytest.raises(NvlinkDomainError, match=r"ended with killed by SIGXFSZ"):
        nvlink_domain(timeout_s=60.0)
