# SPDX-License-Identifier: Apache-2.0
"""torch's store without torch: what it brings, what it is good for, and what follows where not."""

import subprocess
import sys
from pathlib import Path

import pytest

from nvidia_resiliency_ext.inprocess._monitor import boot
from nvidia_resiliency_ext.inprocess._store.endpoint import Endpoint
from nvidia_resiliency_ext.inprocess._store_server import (
    PartialImportError,
    host_store,
    tcp_store_class,
)
from nvidia_resiliency_ext.inprocess.store import TCPStore

USES = """
import runpy, sys
runpy.run_path(sys.argv[1])["make_shell"]()
from nvidia_resiliency_ext.inprocess._store_server import tcp_store_class

store = tcp_store_class()("127.0.0.1", 0, wait_for_workers=False, is_master=True)
store.set("k", "v")
assert store.get("k") == b"v"
assert store.compare_set("k", "v", "w") == b"w"
assert store.add("n", 2) == 2
assert not {"torch.nn", "torch.autograd"} & set(sys.modules)
"""

WHOLE = """
class TCPStore:
    def __init__(self, *_args, **_options) -> None: ...

    def compare_set(self, _key, _expected, wanted):
        return wanted.encode()
"""


@pytest.mark.slow
def test_little_of_torch_is_imported() -> None:
    """The store works, and torch's Python parts have not been imported for it."""
    command = [sys.executable, "-c", USES, boot.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr


def test_torch_that_is_there_is_used() -> None:
    """In a process that has torch the class is torch's own."""
    assert issubclass(TCPStore, tcp_store_class())


def test_other_kinds_of_torch_are_errors_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch whose extension cannot be had alone is an error of its own; none is another."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(PartialImportError, match="torch in"):
        tcp_store_class()
    for name in ("torch", "torch.distributed"):
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torch/__init__.py").unlink()
    (tmp_path / "torch").rmdir()
    with pytest.raises(ImportError, match="not installed"):
        tcp_store_class()


def test_store_server_that_needs_all_of_torch_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store server whose torch cannot be had in part begins again with all of torch."""
    (tmp_path / "torch/distributed").mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/distributed/__init__.py").write_text(WHOLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    here = Endpoint("127.0.0.1", 0, is_served=False)
    store_server = host_store(here, "job", TCPStore.connect, is_single_node=True)
    store_server.stop()
    assert store_server.endpoint.port > 0
