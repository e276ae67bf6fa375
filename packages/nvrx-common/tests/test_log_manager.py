# SPDX-License-Identifier: Apache-2.0
"""The logger "nvrx": one handler of ours, the exact line format, a harmless environment."""

import contextlib
import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils import log_manager
from nvidia_resiliency_ext.shared_utils.log_manager import LogConfig, LogManager, setup_logger
from nvidia_resiliency_ext.shared_utils.log_node_local_tmp import LogMessage, NodeLocalTmpLogHandler

_PREFIXES = ("NVRX_", "SLURM_")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Give the logger without handlers, and leave it as it was found."""
    for name in [*os.environ]:
        if name in _NAMES or (name.startswith(_PREFIXES) and "TEST" not in name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(log_manager, "_state", log_manager._State())
    nvrx = logging.getLogger("nvrx")
    before = (list(nvrx.handlers), nvrx.level, nvrx.propagate)
    nvrx.handlers[:] = []
    yield nvrx
    for handler in nvrx.handlers:
        handler.close()
    nvrx.handlers[:], nvrx.level, nvrx.propagate = before


def _descriptors_of(path: Path) -> int:
    """Count ours that lead to a file; others may come and go with threads of other tests."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}") == str(path)
    return count


def test_text_line_has_the_documented_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line is time, level, node, ranks, place and message, and `LogMessage` reads it back."""
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "SLURM_PROCID": "2"}.items():
        monkeypatch.setenv(name, value)
    setup_logger().info("step %d", 7)
    line = capsys.readouterr().err
    node = re.escape(socket.gethostname())
    form = (
        rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} \[INFO\] \[{node}\]"
        r" \[workload:3\(1\) infra:2\(\?\)\] test_log_manager\.py:\d+ step 7\n"
    )
    assert re.fullmatch(form, line)
    parsed = LogMessage(line.rstrip("\n"))
    assert parsed.log_message_valid
    assert parsed.hash_table["workload_rank"] == "3"
    assert abs(parsed.getts() / 1000 - time.time()) < 60


def test_time_follows_the_standard_library(capsys: pytest.CaptureFixture[str]) -> None:
    """The cached time of a line equals what logging's own formatter writes."""
    handler = setup_logger().handlers[0]
    assert handler.formatter is not None
    for created in (1_700_000_000.0, 1_700_000_000.999, 1_700_000_001.5, 1_699_999_999.001):
        record = logging.LogRecord("nvrx", logging.INFO, "f.py", 1, "m", None, None)
        record.created, record.msecs = created, int(created % 1 * 1000)
        assert handler.formatter.formatTime(record) == logging.Formatter().formatTime(record)


def test_second_call_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    """Without a forced reset, an existing handler stays and the environment is not read again."""
    setup_logger()
    handlers = list(logger.handlers)
    monkeypatch.setenv("NVRX_LOG_DEBUG", "1")
    assert setup_logger() is logger
    assert logger.handlers == handlers
    assert logger.level == logging.INFO
    setup_logger(force_reset=True)
    assert logger.level == logging.DEBUG
    assert logger.handlers != handlers
    assert logger.propagate is False


def test_console_stream_can_be_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """The console handler takes another stream, as any of the standard library does."""
    logger = setup_logger()
    (handler,) = logger.handlers
    assert isinstance(handler, logging.StreamHandler)
    text = io.StringIO()
    before = handler.setStream(text)
    logger.info("elsewhere")
    assert "elsewhere" in text.getvalue()
    assert before is sys.stderr
    assert capsys.readouterr().err == ""


def test_stdout_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVRX_LOG_TO_STDOUT moves the console handler to stdout."""
    monkeypatch.setenv("NVRX_LOG_TO_STDOUT", "Yes")
    setup_logger().info("here")
    captured = capsys.readouterr()
    assert "here" in captured.out
    assert not captured.err


def test_log_file_has_the_rank_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log file is appended to, each line after the infra rank as wide as the highest rank."""
    path = tmp_path / "a.log"
    path.write_text("before\n")
    monkeypatch.setenv("WORLD_SIZE", "128")
    monkeypatch.setenv("SLURM_PROCID", "7")
    setup_logger(log_file=str(path)).info("one")
    monkeypatch.delenv("SLURM_PROCID")
    setup_logger(log_file=str(path), force_reset=True).info("two")
    lines = path.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[1].startswith("  7: 2")
    assert lines[2].startswith("  ?: 2")
    assert all(LogMessage(line).log_message_valid for line in lines[1:])


def test_node_local_directory(tmp_path: Path, logger: logging.Logger) -> None:
    """With a directory given, the only handler writes a file of this rank and process there."""
    manager = LogManager(str(tmp_path / "logs"), node_local_tmp_prefix="launcher")
    manager.logger.info("hello")
    (path,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"rank_unknown_launcher\.msg\.\d+", path.name)
    assert manager.node_local_tmp_logging_enabled
    assert [type(handler) for handler in logger.handlers] == [NodeLocalTmpLogHandler]


def test_unsafe_directory_is_refused(tmp_path: Path, logger: logging.Logger) -> None:
    """A directory that anybody may write to is refused, and the handler before it stays."""
    setup_logger()
    handlers = list(logger.handlers)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(OSError, match="open"):
        setup_logger(str(tmp_path / "open"), force_reset=True)
    assert logger.handlers == handlers


def test_resets_leak_no_descriptor(tmp_path: Path, logger: logging.Logger) -> None:
    """A handler that a reset removes is closed at once, even while somebody still refers to it."""
    kept = []
    path = tmp_path.resolve() / "a.log"
    setup_logger(log_file=str(path), force_reset=True)
    for _ in range(1000):
        kept.append(logger.handlers[0])
        setup_logger(log_file=str(path), force_reset=True)
    assert _descriptors_of(path) == 1


def test_threads_make_one_handler(logger: logging.Logger) -> None:
    """However many threads set the logger up at once, it has one handler."""
    barrier = threading.Barrier(16)

    def run() -> None:
        barrier.wait(timeout=10)
        for _ in range(20):
            setup_logger()
            setup_logger(force_reset=True)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(logger.handlers) == 1


def test_handlers_of_the_user_stay(logger: logging.Logger) -> None:
    """A reset removes our handler only."""
    setup_logger()
    own = logging.NullHandler()
    logger.addHandler(own)
    setup_logger(force_reset=True)
    assert own in logger.handlers
    assert len(logger.handlers) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVRX_LOG_MAX_FILE_SIZE_KB", "ten"),
        ("NVRX_LOG_MAX_LOG_FILES", "-1"),
        ("RANK", "0x3"),
        ("NVRX_LOG_FORMAT", "xml"),
    ],
)
def test_bad_value_gives_one_warning(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that makes no sense becomes one warning in the new log, and the default holds."""
    monkeypatch.setenv(name, value)
    for _ in range(3):
        setup_logger(str(tmp_path), force_reset=True, node_local_tmp_prefix="p").info("x")
    (path,) = tmp_path.iterdir()
    assert path.read_text().count(name) == 1
    assert "[WARNING]" in path.read_text().splitlines()[0]
    assert LogConfig.get_max_file_size() == 10240 * 1024
    assert LogConfig.get_max_log_files() == 4
    assert LogConfig.get_workload_rank() is None


@pytest.mark.parametrize("host", ["100%s", "a{b}", "%(message)s", "50%"])
def test_any_host_name(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No character in the host's name breaks the format."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    setup_logger().info("fine")
    assert f"[{host}] [workload" in capsys.readouterr().err


def test_json_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """NVRX_LOG_FORMAT=json writes one object per record, with traceback and cycle."""
    monkeypatch.setenv("NVRX_LOG_FORMAT", "json")
    monkeypatch.setenv("NVRX_CYCLE", "4")
    monkeypatch.setenv("RANK", "3")
    nvrx = setup_logger()
    try:
        {}["a\nb"]
    except KeyError:
        nvrx.exception("it %s", "broke\nhere")
    nvrx.info("later", extra={"cycle": 5})
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert set(first) == {
        "ts", "level", "node", "ranks", "cycle", "file", "line", "msg", "exc",
    }  # fmt: skip
    assert first["msg"] == "it broke\nhere"
    assert "KeyError" in first["exc"]
    assert first["ranks"]["workload"] == 3
    assert (first["cycle"], second["cycle"]) == (4, 5)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"SLURM_PROCID": "3"}, 3),
        ({"SLURM_PROCID": "3", "SLURM_ARRAY_TASK_ID": "2"}, 3),
        ({"SLURM_PROCID": "3", "SLURM_ARRAY_TASK_ID": "2", "SLURM_NNODES": "8"}, 19),
        ({"SLURM_PROCID": "1", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NUM_NODES": "4"}, 9),
        ({"SLURM_ARRAY_TASK_ID": "2", "SLURM_NNODES": "8"}, None),
    ],
)
def test_infra_rank(
    environment: dict[str, str], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The infra rank counts over all tasks of a Slurm array."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert LogConfig.get_infra_rank() == rank


def test_a_bad_number_of_nodes_matters_in_arrays_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    """What is not used is not complained of."""
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NNODES", "unusable 1")
    assert LogConfig.get_infra_rank() == 3
    assert "SLURM_NNODES" not in caplog.text + capfd.readouterr().err


def test_names_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of node, process and merged file follow the documented rules."""
    assert LogConfig.name == "nvrx"
    assert LogConfig.get_log_file() == f"nvrx_log_{socket.gethostname()}.log"
    assert LogConfig.get_process_name() == str(os.getpid())
    assert LogConfig.get_process_name("x") == "x"
    assert LogConfig.get_max_file_size(2) == 2048
    assert LogConfig.get_node_local_tmp_dir() is None
    monkeypatch.setenv("NVRX_NODE_LOCAL_TMPDIR", "/d")
    assert LogConfig.get_node_local_tmp_dir() == "/d"
    assert LogConfig.get_node_local_tmp_dir("/e") == "/e"


def test_reset_in_a_forked_child(tmp_path: Path) -> None:
    """A child forked while another thread sets the logger up can set it up itself."""
    code = (
        "import os, threading\n"
        "from nvidia_resiliency_ext.shared_utils.log_manager import setup_logger\n"
        "stop = threading.Event()\n"
        "def run():\n"
        "    while not stop.is_set(): setup_logger(force_reset=True)\n"
        "thread = threading.Thread(target=run); thread.start()\n"
        "for _ in range(20):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        setup_logger(force_reset=True).info('child'); os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "stop.set(); thread.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, timeout=150, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("child") == 20
