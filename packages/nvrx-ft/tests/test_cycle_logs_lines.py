# SPDX-License-Identifier: Apache-2.0
"""From bytes of a pipe to lines of a log, and what waits for a log that takes nothing."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from nvidia_resiliency_ext.fault_tolerance._logs import lines, outlet
from nvidia_resiliency_ext.fault_tolerance._logs.lines import (
    LineAssembler,
    cycle_log_file,
    rank_prefix,
)
from nvidia_resiliency_ext.fault_tolerance._logs.outlet import Backlog, Target
from nvidia_resiliency_ext.fault_tolerance._logs.reader import pipe_bytes

PREFIX = b" 3: "
NAME = set(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-/")


def is_noise(line: bytes) -> bool:
    """Say whether a line only lists a device; written without the code under test."""
    words = line.removesuffix(b"\r").replace(b"\t", b" ").strip(b" ").split(b" ")
    words = [word for word in words if word]
    if words in ([b"Character", b"devices:"], [b"Block", b"devices:"]):
        return line.strip(b" \t\r") in (b"Character devices:", b"Block devices:")
    return (
        len(words) == 2
        and 1 <= len(words[0]) <= 3
        and all(byte in b"0123456789" for byte in words[0])
        and set(words[1]) <= NAME
    )


def expected(data: bytes, longest: int) -> bytes:
    """Return what a stream must become, line by line."""
    found = data.split(b"\n")
    if not found[-1]:
        found.pop()
    out = b""
    for line in found:
        rest = line
        while True:
            end = len(rest)
            if end > longest:
                end = longest
                for back in range(4):
                    if rest[longest - back] & 0xC0 != 0x80:
                        end = longest - back
                        break
            piece, rest = rest[:end], rest[end:]
            if not is_noise(piece):
                text = piece.decode(errors="replace").encode().replace(b"\0", b"<NUL>")
                out += PREFIX + text + b"\n"
            if not rest:
                break
    return out


def fed(data: bytes, sizes: itertools.cycle[int]) -> bytes:
    """Return what comes out when the bytes come in pieces of these sizes."""
    assembler = LineAssembler(PREFIX)
    out = b""
    while data:
        size = next(sizes)
        out += assembler.feed(data[:size])
        data = data[size:]
    return out + assembler.finish()


def some_stream(draw: random.Random) -> bytes:
    """Return a stream of lines of all kinds."""
    kinds = (
        lambda: b"step %d loss 2.5" % draw.randrange(10**6),
        lambda: b"",
        lambda: b"Character devices:",
        lambda: b"  Block devices: ",
        lambda: b" %d dev-%d/x" % (draw.randrange(2000), draw.randrange(9)),
        lambda: b"12 two words",
        lambda: "grüße 漢字 🙂".encode() * draw.randrange(8),
        lambda: bytes(draw.randrange(256) for _ in range(draw.randrange(90))).replace(b"\n", b" "),
        lambda: b"\0\0a\0",
        lambda: b"progress\r\r",
        lambda: b"x" * draw.randrange(130),
    )
    made = [draw.choice(kinds)() for _ in range(draw.randrange(12))]
    return b"\n".join(made) + draw.choice((b"", b"\n", b"\n\n"))


@pytest.mark.parametrize("seed", range(40))
def test_lines_do_not_depend_on_how_they_were_read(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reads, a stream becomes what it is line by line."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 50)
    draw = random.Random(seed)
    for _ in range(50):
        data = some_stream(draw)
        sizes = itertools.cycle([draw.randrange(1, 80) for _ in range(5)])
        want = expected(data, 50)
        assert fed(data, sizes) == want
        assert fed(data, itertools.cycle([len(data) or 1])) == want
        assert fed(data, itertools.cycle([1])) == want


def test_a_character_that_two_reads_share_stays_whole() -> None:
    """A read may end within a character; the line has it whole."""
    assembler = LineAssembler(b"0: ")
    data = "a🙂b\n".encode()
    assert assembler.feed(data[:3]) + assembler.feed(data[3:]) == b"0: " + data


def test_a_line_without_end_is_cut_and_not_held() -> None:
    """A line beyond 1 MiB leaves in pieces, and no more than one piece is kept."""
    assembler = LineAssembler(b"0: ")
    out = b"".join(assembler.feed(b"x" * 100_000) for _ in range(33))
    assert out.count(b"\n") == 3
    assert len(assembler._rest) <= lines.MAX_LINE_BYTES
    assert len(out + assembler.finish()) == 3_300_000 + 4 * len(b"0: \n")


def test_a_text_of_the_launcher_is_left_as_it_is() -> None:
    """Without a prefix, and told to, it passes lines on."""
    assembler = LineAssembler(drops_noise=False)
    assert assembler.feed(b"a\n  1 mem\n\nb") + assembler.finish() == b"a\n  1 mem\n\nb\n"


@pytest.mark.parametrize(
    ("rank", "world_size", "prefix"), [(0, 1, b"0: "), (7, 8, b"7: "), (9, 11, b" 9: ")]
)
def test_prefixes_are_as_wide_as_the_largest_rank(
    rank: int, world_size: int, prefix: bytes
) -> None:
    """The prefix has the width of the last rank's number."""
    assert rank_prefix(rank, world_size) == prefix


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("/a/job.log", "/a/job_cycle3.log"),
        ("/a.b/job", "/a.b/job_cycle3.log"),
        ("/x.txt", "/x_cycle3.txt"),
    ],
)
def test_a_cycle_s_log_keeps_the_extension(base: str, name: str) -> None:
    """The cycle stands before the extension, which is .log where there is none."""
    assert cycle_log_file(base, 3) == name


@pytest.mark.parametrize(("workers", "size"), [(1, 1 << 20), (16, 1 << 20), (64, 1 << 18)])
def test_pipes_of_many_workers_are_smaller(workers: int, size: int) -> None:
    """All pipes of a node stay within a share of what the kernel gives to one user."""
    assert pipe_bytes(workers) == size


# --- what waits -----------------------------------------------------------------------------------


def all_of(backlog: Backlog, target: Target) -> bytes:
    """Take everything that waits for a log."""
    out = b""
    while target.has_lines:
        out += backlog.take(target)
    return out


@pytest.mark.parametrize("seed", range(20))
def test_what_waits_keeps_its_order_and_says_what_is_missing(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, then files: lines come in order; those that are gone are counted in a line."""
    draw = random.Random(seed)
    monkeypatch.setattr(outlet, "SPILL_BYTES", draw.choice((0, 3000, 10**6)))
    backlog = Backlog(2000, str(tmp_path))
    target, other = backlog.open("log"), backlog.open("other")
    sent, out = [], b""
    for number in range(400):
        data = b"%d %s\n" % (number, b"x" * draw.randrange(60))
        sent.append(data)
        backlog.put(target, data)
        if draw.random() < 0.2:
            backlog.put(other, b"o\n")
        assert backlog.memory_bytes <= 2000
        if draw.random() < 0.1 and target.has_lines:
            out += backlog.take(target)
    out += all_of(backlog, target)
    found = out.splitlines(keepends=True)
    notices = [line for line in found if line.startswith(b"[nvrx] dropped")]
    kept = [line for line in found if line not in notices]
    assert kept == [line for line in sent if line in set(kept)]
    counted = [line.split() for line in notices]
    assert sum(int(words[2]) for words in counted) == len(sent) - len(kept)
    dropped = sum(map(len, sent)) - sum(map(len, kept))
    assert sum(int(words[4].lstrip(b"(")) for words in counted) == dropped
    assert sent[-1] in kept
    all_of(backlog, other)
    assert backlog.spilled_bytes == 0


def test_lines_in_files_come_back_and_the_files_go(tmp_path: Path) -> None:
    """Spilled lines are replayed in order; the files have no names and no room in the end."""
    backlog = Backlog(1 << 20, str(tmp_path))
    target = backlog.open("log")
    blocks = [b"%06d\n" % number * 40_000 for number in range(80)]
    for block in blocks:
        backlog.put(target, block)
    assert backlog.spilled_bytes > 10 << 20
    assert all_of(backlog, target) == b"".join(blocks)
    assert backlog.spilled_bytes == 0
    assert not list(tmp_path.iterdir())


def test_a_spill_directory_that_is_gone_drops_the_oldest() -> None:
    """Without room anywhere the newest lines stay, and the rest is counted."""
    backlog = Backlog(1000, "/proc/nonexistent")
    target = backlog.open("log")
    for number in range(100):
        backlog.put(target, b"%099d\n" % number)
    out = all_of(backlog, target).splitlines()
    assert out[0].startswith(b"[nvrx] dropped ")
    assert int(out[-1]) == 99
    assert int(out[0].split()[2]) + len(out) - 1 == 100
