# SPDX-License-Identifier: Apache-2.0
"""The self-check: conflicts are errors, missing facilities are told, stale directories removed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils import doctor, procfs
from nvidia_resiliency_ext.shared_utils.children import pidfd_available
from nvidia_resiliency_ext.shared_utils.doctor import package_findings

_COMMAND = [sys.executable, "-m", "nvidia_resiliency_ext.shared_utils.doctor"]


def _stale(place: Path) -> Path:
    """Make a run directory whose owner belongs to an earlier boot."""
    path = place / "nvrx-old-0123456789abcdef"
    path.mkdir(mode=0o700)
    owner = {"pid": 1, "boot_id": "another boot", "host": os.uname().nodename, "start_ticks": 1}
    (path / "owner.json").write_text(json.dumps(owner))
    return path


def test_conflicting_package_is_an_error(tmp_path: Path) -> None:
    """An installed package that owns the same files makes the check fail and says what to do."""
    info = tmp_path / "nvidia_resiliency_ext-0.4.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia_resiliency_ext\nVersion: 0.4.1\n"
    )
    (tmp_path / "broken-1.dist-info").mkdir()
    done = subprocess.run(
        _COMMAND, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert "0.4.1" in line
    assert "uninstall" in line


def test_packages() -> None:
    """Our packages and torch are named with their versions, others are not."""
    found = list(
        package_findings({"nvrx-common": "0.7.0", "nvrx-ft": "0.8.0", "torch": "2", "x": "1"})
    )
    assert {(each.topic, each.text) for each in found if each.level == "ok"} == {
        ("nvrx-common", "0.7.0"), ("nvrx-ft", "0.8.0"), ("torch", "2"),
    }  # fmt: skip
    assert not [each for each in found if each.level == "error"]


def test_facilities_are_named() -> None:
    """Each facility that may be missing has its finding."""
    topics = {finding.topic for finding in doctor.findings()}
    assert topics >= {
        "pidfd_open", "memfd_create", "PDEATHSIG", "/dev/shm", "XDG_RUNTIME_DIR",
        "run directory", "temporary files", "home", "python",
    }  # fmt: skip


def test_hardware_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the health checks find is told: a node that lacks GPUs needs a person."""
    monkeypatch.setenv("NVRX_EXPECTED_GPUS", "1000")
    found = {finding.topic: finding for finding in doctor.findings()}
    assert found["gpu health"].level == "error"
    assert "1000 are expected" in found["gpu health"].text
    assert {"nvlink health", "nic state health", "storage health"} <= set(found)


def test_missing_facility_names_what_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pidfds the check warns and says what is used instead."""
    pidfd_available.cache_clear()
    monkeypatch.setenv("NVRX_FORCE_NO_PIDFD", "1")
    (finding,) = [each for each in doctor.findings() if each.topic == "pidfd_open"]
    pidfd_available.cache_clear()
    assert finding.level == "warning"
    assert "waitid" in finding.text


def test_stale_run_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stale run directory is reported and stays; with --clean it goes."""
    if not procfs.boot_id():
        pytest.skip("this kernel has no boot id")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    stale = _stale(tmp_path)
    assert doctor.main([]) in {0, 1}
    assert str(stale) in capsys.readouterr().out
    assert stale.exists()
    doctor.main(["--clean", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not stale.exists()
    assert {"level": "info", "topic": "run directory", "text": f"removed {stale}"} in lines


def test_import_stays_light() -> None:
    """Importing the check reads no package metadata."""
    code = (
        "import sys, nvidia_resiliency_ext.shared_utils.doctor\n"
        "sys.exit('importlib.metadata' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=150, check=False).returncode == 0
