# SPDX-License-Identifier: Apache-2.0
"""Per-node log files: names, change of file by size, what is kept, and lines read back."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvidia_resiliency_ext.shared_utils._logging.handler import (
    TextLineFormatter,
    line_format,
    open_log_directory,
)
from nvidia_resiliency_ext.shared_utils.log_node_local_tmp import (
    DynamicLogFormatter,
    LogMessage,
    NodeLocalTmpLogHandler,
)

_LINE = "2026-01-02 03:04:05,678 [INFO] [n1] [workload:0(?) infra:?(2)] a.py:17 hello: [x] 1:2"


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord("nvrx", logging.INFO, "f.py", 1, text, None, None)


def _names(directory: Path) -> list[str]:
    names = (path.name for path in directory.glob("rank_*"))
    return sorted(names, key=lambda n: int(n.split(".")[-1]))


def _lines(directory: Path) -> list[str]:
    return "".join((directory / name).read_text() for name in _names(directory)).splitlines()


def _numbers(directory: Path) -> list[int]:
    return [int(line) for line in _lines(directory) if not line.endswith(" log records dropped")]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NodeLocalTmpLogHandler]]:
    """Make handlers that write to the test's directory, and close them."""
    made: list[NodeLocalTmpLogHandler] = []

    def build(
        rank: int | None = 3, size: int = 10_000, backups: int = 2, name: str = "p"
    ) -> NodeLocalTmpLogHandler:
        handler = NodeLocalTmpLogHandler(rank, str(tmp_path), size, backups, name)
        made.append(handler)
        return handler

    yield build
    for handler in made:
        handler.close()


Make = Callable[..., NodeLocalTmpLogHandler]


def test_name_of_the_file(make: Make, tmp_path: Path) -> None:
    """The file is named after rank, process and time, and appears with the first record."""
    handler = make()
    assert not _names(tmp_path)
    before_ms = int(time.time() * 1000)
    handler.emit(_record("a"))
    (name,) = _names(tmp_path)
    match = re.fullmatch(r"rank_3_p\.msg\.(\d+)", name)
    assert match
    assert before_ms <= int(match[1]) <= time.time() * 1000
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_newest_file_is_used_again(make: Make, tmp_path: Path) -> None:
    """The first record goes to the newest file of the same rank and process, and to no other's."""
    for name in ("rank_3_p.msg.100", "rank_3_p.msg.99", "rank_4_p.msg.200", "rank_3_pp.msg.300"):
        (tmp_path / name).write_text("old\n")
    make().emit(_record("new"))
    assert (tmp_path / "rank_3_p.msg.100").read_text() == "old\nnew\n"
    assert len(_names(tmp_path)) == 4


@pytest.mark.parametrize("backups", [0, 1, 4])
def test_number_of_files(backups: int, make: Make, tmp_path: Path) -> None:
    """After many changes of file exactly `max_backup_files` older files stay, the newest ones."""
    handler = make(size=200, backups=backups)
    for number in range(100):
        handler.emit(_record(f"{number:049d}"))
    names = _names(tmp_path)
    assert len(names) == backups + 1
    numbers = _numbers(tmp_path)
    assert numbers == list(range(numbers[0], 100))
    assert all((tmp_path / name).stat().st_size <= 250 for name in names)


@pytest.mark.parametrize("backups", [0, 1, 4])
def test_dropped_records_are_counted(backups: int, make: Make, tmp_path: Path) -> None:
    """The last complaint in the files says exactly how many records are not there any more."""
    handler = make(size=40, backups=backups)
    for number in range(100):
        handler.emit(_record(f"{number}" if number % 7 else f"{number}\nmore\n\nlines"))
    lines = _lines(tmp_path)
    complaints = [line for line in lines if line.endswith(" log records dropped")]
    kept = [line for line in lines if line not in complaints and not line.startswith("\t")]
    assert int(complaints[-1].split()[0]) + len(kept) == 100


def test_complaint_is_a_record(make: Make, tmp_path: Path) -> None:
    """What was dropped is said by a warning in the usual form."""
    handler = make(size=10, backups=0)
    fmt = line_format("n1", (3, None), (None, None))
    handler.setFormatter(TextLineFormatter(fmt))
    for _ in range(3):
        handler.emit(_record("x"))
    (first, *_) = _lines(tmp_path)
    found = LogMessage(first)
    assert found.hash_table["levelname"] == "WARNING"
    assert found.hash_table["message"] == "2 log records dropped"


def test_no_text_passes_for_another_record(make: Make, tmp_path: Path) -> None:
    """Only the first line of a message looks like a record's, and none steers a terminal."""
    forged = _LINE.replace("workload:0", "workload:7")
    handler = make()
    handler.emit(_record(f"a\n{forged}\r{forged}\x1b[2J\x85{forged}\u2028{forged}\n\ttab\xe9"))
    handler.emit(_record("b"))
    (name,) = _names(tmp_path)
    lines = (tmp_path / name).read_bytes().decode().splitlines()
    assert [line[0] for line in lines] == ["a", "\t", "\t", "b"]
    assert lines[2] == "\t\ttab\xe9"
    assert "\\x1b[2J\\x85" in lines[1]


def test_line_of_a_dead_writer_is_ended(make: Make, tmp_path: Path) -> None:
    """Who goes on with a file whose last line is not finished begins a new line."""
    (tmp_path / "rank_3_p.msg.100").write_text("whole\nhal")
    make().emit(_record("next"))
    assert (tmp_path / "rank_3_p.msg.100").read_text() == "whole\nhal\nnext\n"


def test_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """A directory that another user owns is not logged to."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(OSError, match="belongs to uid 12345"):
        os.close(open_log_directory(str(tmp_path)))


@pytest.mark.no_second_try
def test_unwritable_record_goes_to_stderr(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that has no file is not lost but written to stderr."""
    (tmp_path / "rank_3_p.msg.9999999999999").symlink_to("/dev/null")
    make().emit(_record("precious"))
    assert capsys.readouterr().err == "precious\n"


def test_removed_file_is_made_again(make: Make, tmp_path: Path) -> None:
    """When somebody removed file and directory, the next record makes them again."""
    handler = make()
    handler.emit(_record("a"))
    for name in _names(tmp_path):
        (tmp_path / name).unlink()
    tmp_path.rmdir()
    handler.emit(_record("b"))
    (name,) = _names(tmp_path)
    assert (tmp_path / name).read_text() == "b\n"


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.no_second_try
def test_descriptor_that_the_program_closed_is_opened_anew(
    is_taken: bool, make: Make, tmp_path: Path
) -> None:
    """After a program closed all descriptors, no record is lost or put into a file of its own."""
    logs, other = tmp_path, tmp_path / "other"
    handler = make()
    handler.emit(_record("a"))
    number = handler._fd
    os.close(number)
    if is_taken:
        fd = os.open(other, os.O_WRONLY | os.O_CREAT)
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
    handler.emit(_record("b"))
    handler.close()
    if is_taken:
        assert other.read_bytes() == b""
        os.close(number)
        other.unlink()
    (name,) = _names(logs)
    assert (logs / name).read_text() == "a\nb\n"


@pytest.mark.no_second_try
def test_forked_children_write_whole_lines(make: Make, tmp_path: Path) -> None:
    """Parent and children go on with the same file and no line is broken or lost."""
    handler = make(size=10**9)
    handler.emit(_record("start"))
    pids = []
    for child in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                for number in range(200):
                    handler.handle(_record(f"{child}-{number}-" + "x" * 200))
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
    (name,) = _names(tmp_path)
    lines = (tmp_path / name).read_text().splitlines()
    assert len(lines) == 801
    assert all(line.endswith("x" * 200) for line in lines[1:])


def test_line_is_taken_apart() -> None:
    """Every field of a line is found, and the time counts in milliseconds."""
    message = LogMessage(_LINE)
    assert message.log_message_valid
    expected_ms = int(time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))) * 1000 + 678
    assert message.getts() == expected_ms
    assert message.hash_table == {
        "asctime": expected_ms,
        "levelname": "INFO",
        "hostname": "n1",
        "workload_rank": "0",
        "workload_local_rank": "?",
        "infra_rank": "?",
        "infra_local_rank": "2",
        "filename": "a.py",
        "lineno": "17",
        "message": "hello: [x] 1:2",
    }
    assert str(message) == _LINE
    assert LogMessage(f"  2: {_LINE}").log_message_valid


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Traceback (most recent call last):",
        _LINE.replace("2026-01-02", "2026-13-02"),
        _LINE.replace("03:04:05", "25:04:05"),
        _LINE.replace(",678", ""),
        _LINE.replace("workload", "work"),
        "x" * 100_000,
        "2026-01-02 03:04:05,678 [" + "I" * 100_000,
    ],
)
def test_other_lines_are_not_valid(line: str) -> None:
    """A line of another form, or with an impossible time, is recognised as such."""
    message = LogMessage(line)
    assert not message.log_message_valid
    assert message.getts() == 0
    assert message.hash_table == {}


def test_formatter_adds_ranks() -> None:
    """A format may name the four ranks; an unknown one is a question mark."""
    fmt = (
        "%(workload_rank)s %(workload_local_rank)s %(infra_rank)s %(infra_local_rank)s %(message)s"
    )
    assert DynamicLogFormatter(0, None, 7, None, fmt=fmt).format(_record("m")) == "0 ? 7 ? m"
    dated = DynamicLogFormatter(fmt="%(asctime)s", datefmt="%Y")
    assert re.fullmatch(r"\d{4}", dated.format(_record("m")))
