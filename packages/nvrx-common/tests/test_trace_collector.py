# SPDX-License-Identifier: Apache-2.0
"""A dump of the flight recorder is saved under the rank's name, with the health of its devices."""

import json
import os
import pickle
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nvidia_resiliency_ext.shared_utils.trace_collector import (
    NoFlightRecorderError,
    TorchFRTraceCollector,
    TraceCollector,
)

_ENTRY = {"record_id": 3, "profiling_name": "nccl:all_reduce"}


class _Recorder(ModuleType):
    """Stands in for torch's bindings; each source gives the entries it was made with."""

    def __init__(self, **entries: list[Mapping[str, Any]]) -> None:
        super().__init__("torch._C._distributed_c10d")
        self.asked: list[dict[str, bool]] = []
        for name, found in entries.items():
            setattr(self, f"_dump_{name}_trace_json", self._source(found, json.dumps))
            setattr(self, f"_dump_{name}_trace", self._source(found, pickle.dumps))

    def _source(self, entries: list[Mapping[str, Any]], pack: Any) -> Any:
        def dump(**options: bool) -> bytes:
            self.asked.append(options)
            packed = pack({"version": "2.10", "entries": entries})
            return packed if isinstance(packed, bytes) else packed.encode()

        return dump


def _install(monkeypatch: pytest.MonkeyPatch, recorder: _Recorder | None) -> None:
    package = ModuleType("torch._C")
    torch = ModuleType("torch")
    for name, module in {"torch": torch, "torch._C": package, recorder_name: recorder}.items():
        monkeypatch.setitem(sys.modules, name, module)
    if recorder is not None:
        package._distributed_c10d = recorder  # type: ignore[attr-defined]
    monkeypatch.setenv("RANK", "5")


recorder_name = "torch._C._distributed_c10d"


def test_saved_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Active collectives without stacks are saved as JSON, with what the checks found."""
    recorder = _Recorder(nccl=[_ENTRY], fr=[])
    _install(monkeypatch, recorder)
    checks = {"gpu": lambda: True, "nic": lambda: False, "odd": lambda: 1 / 0}
    path = TorchFRTraceCollector(str(tmp_path / "iter_2"), checks=checks).collect()
    assert path == str(tmp_path / "iter_2" / "_dump_5.json")
    dump = json.loads(Path(path).read_text())
    assert dump["entries"] == [_ENTRY]
    found = dump["health_check_results"]
    assert {name: each["status"] for name, each in found.items()} == {
        "gpu": "Healthy", "nic": "Failed", "odd": "Failed",
    }  # fmt: skip
    assert "ZeroDivisionError" in found["odd"]["output"]
    assert recorder.asked == [{"includeCollectives": True, "onlyActive": True}]
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o640


def test_saved_as_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On request the file is the pickle that torch's own tools read, its name has no ending."""
    recorder = _Recorder(nccl=[_ENTRY])
    _install(monkeypatch, recorder)
    path = TorchFRTraceCollector(str(tmp_path), json=False, checks={}).collect()
    assert path == str(tmp_path / "_dump_5")
    dump = pickle.loads(Path(path).read_bytes())
    assert (dump["entries"], dump["health_check_results"]) == ([_ENTRY], {})
    assert recorder.asked[0]["includeStackTraces"] is False


def test_other_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NCCL's recorder knows nothing, the one of the other backends is asked."""
    _install(monkeypatch, _Recorder(nccl=[], fr=[_ENTRY]))
    collector = TorchFRTraceCollector(str(tmp_path), checks={})
    assert collector.take()["entries"] == [_ENTRY]
    _install(monkeypatch, _Recorder(fr=[]))
    assert collector.take()["entries"] == []


def test_a_recorder_without_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch gives only a pickle, its content is saved as JSON all the same."""
    recorder = _Recorder(nccl=[_ENTRY])
    del recorder._dump_nccl_trace_json
    _install(monkeypatch, recorder)
    path = TorchFRTraceCollector(str(tmp_path), checks={}).collect()
    assert path == str(tmp_path / "_dump_5.json")
    assert json.loads(Path(path).read_text())["entries"] == [_ENTRY]


@pytest.mark.parametrize("recorder", [None, _Recorder()])
def test_no_recorder(
    recorder: _Recorder | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch or without a recorder the error says so, and no directory is made."""
    _install(monkeypatch, recorder)
    collector = TorchFRTraceCollector(str(tmp_path / "new"), checks={})
    with pytest.raises(NoFlightRecorderError, match="no flight recorder"):
        collector.collect()
    assert not (tmp_path / "new").exists()


def test_default_checks_never_cost_the_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health checks that cannot be made leave the dump without results."""
    _install(monkeypatch, _Recorder(fr=[_ENTRY]))
    monkeypatch.setenv("LOCAL_RANK", "not a number")
    dump = json.loads(Path(TorchFRTraceCollector(str(tmp_path)).collect()).read_text())
    assert (dump["entries"], dump["health_check_results"]) == ([_ENTRY], {})


def test_taken_before_and_saved_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken can be saved later, when the recorder is gone; only then devices are asked."""
    asked: list[int] = []
    _install(monkeypatch, _Recorder(fr=[_ENTRY]))
    collector: TraceCollector = TorchFRTraceCollector(
        str(tmp_path), checks={"gpu": lambda: asked.append(1) or True}
    )
    assert isinstance(collector, TorchFRTraceCollector)
    data = collector.take()
    assert not asked
    _install(monkeypatch, None)
    assert json.loads(Path(collector.save(data)).read_text())["entries"] == [_ENTRY]


@pytest.mark.slow
def test_with_torch(tmp_path: Path) -> None:
    """torch's real recorder names a collective of a gloo group that is waiting for its peer."""
    pytest.importorskip("torch")
    from torch._C import _distributed_c10d

    if not hasattr(_distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch has no flight recorder for gloo")
    program = (
        "import os, sys, time\n"
        "import torch, torch.distributed as dist\n"
        "from nvidia_resiliency_ext.shared_utils.trace_collector import *\n"
        "rank = int(os.fork() == 0)\n"
        "os.environ['RANK'] = str(rank)\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store',\n"
        "                        rank=rank, world_size=2)\n"
        "dist.barrier()\n"
        "if rank == 0:\n"
        "    work = dist.all_reduce(torch.ones(7), async_op=True)\n"
        "    print(TorchFRTraceCollector(sys.argv[1], checks={}).collect(), flush=True)\n"
        "    open(sys.argv[1] + '/taken', 'w').close()\n"
        "    work.wait()\n"
        "    assert os.wait()[1] == 0\n"
        "else:\n"
        "    while not os.path.exists(sys.argv[1] + '/taken'): time.sleep(0.01)\n"
        "    dist.all_reduce(torch.ones(7))\n"
        # Now and then torch aborts at the interpreter's end while a thread of gloo runs.
        "os._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "out")],
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as ranks:  # fmt: skip
        try:
            output, errors = ranks.communicate(timeout=150)
        finally:
            if ranks.poll() is None:
                os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, errors
    dump = json.loads(Path(output.strip()).read_text())
    active = [each for each in dump["entries"] if each["input_sizes"] == [[7]]]
    assert [each["profiling_name"] for each in active] == ["gloo:all_reduce"]
