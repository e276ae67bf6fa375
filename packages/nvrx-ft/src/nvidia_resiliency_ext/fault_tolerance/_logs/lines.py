# SPDX-License-Identifier: Apache-2.0
"""Names of cycle logs and the prefixes of their lines. Pure.

The output does not depend on how the bytes were cut into reads, save that lines come out later.
"""

from __future__ import annotations

import os
import re


def cycle_log_file(base_log_file: str, cycle: int) -> str:
    """Return the log of one `cycle`: the `base_log_file` job.log gives job_cycle3.log."""
    stem, extension = os.path.splitext(base_log_file)
    return f"{stem}_cycle{cycle}{extension or '.log'}"


def rank_prefix(rank: int, world_size: int) -> bytes:
    """Return the prefix of each line of a rank, of the same width for all ranks."""
    width = len(str(max(world_size - 1, rank)))
    return f"{rank:>{width}}: ".encode()


MAX_LINE_BYTES = 1 << 20
_NUL = b"<NUL>"
# What drivers print when they list /proc/devices. It starts at a newline, so that the search skips
# to the next one at the speed of memchr; the newline behind belongs to the next match.
_NOISE = re.compile(
    rb"\n[ \t]*(?:(?:Character|Block) devices:|[0-9]{1,3}[ \t]+[A-Za-z0-9_\-/]+)[ \t]*\r?(?=\n)"
)
_CONTINUATION, _CONTINUATION_MASK = 0x80, 0xC0
_LONGEST_CHARACTER = 4


class LineAssembler:
    """Makes lines of one stream: give it bytes as they come, take whole lines.

    A NUL becomes `<NUL>`, bytes that are no UTF-8 become U+FFFD, a line of more than 1 MiB goes on
    in a new line, and lines of driver noise are left out.
    """

    def __init__(self, prefix: bytes = b"", *, drops_noise: bool = True) -> None:
        self._prefix = prefix
        self._separator = b"\n" + prefix
        self._drops_noise = drops_noise
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Take bytes and return the lines that are complete now."""
        end = data.rfind(b"\n")
        if end < 0:
            self._rest += data
            return self._cut_rest()
        lines = b"".join((b"\n", self._rest, data[: end + 1]))
        self._rest[:] = data[end + 1 :]
        return self._format(lines) + self._cut_rest()

    def finish(self) -> bytes:
        """Return the last line, with a newline, although it has none."""
        if not self._rest:
            return b""
        lines = b"\n%b\n" % bytes(self._rest)
        self._rest.clear()
        return self._format(lines)

    def _cut_rest(self) -> bytes:
        if len(self._rest) <= MAX_LINE_BYTES:
            return b""
        *pieces, rest = _pieces(bytes(self._rest))
        self._rest[:] = rest
        return self._format(b"\n%b\n" % b"\n".join(pieces))

    def _format(self, text: bytes) -> bytes:
        """Return finished lines; `text` is whole lines with one newline more in front."""
        if len(text) > MAX_LINE_BYTES:
            lines = text[1:-1].split(b"\n")
            if any(len(line) > MAX_LINE_BYTES for line in lines):
                lines = [piece for line in lines for piece in _pieces(line)]
                text = b"\n%b\n" % b"\n".join(lines)
        if self._drops_noise and _NOISE.search(text):
            text = _NOISE.sub(b"", text)
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError:
                text = text.decode(errors="replace").encode()
        if b"\0" in text:
            text = text.replace(b"\0", _NUL)
        if not self._prefix:
            return text[1:]
        # Each newline now begins a line; the last one begins nothing.
        return text.replace(b"\n", self._separator)[1 : -len(self._prefix)]


def _pieces(line: bytes) -> list[bytes]:
    """Cut a line into pieces of the largest size, between characters."""
    pieces = []
    start = 0
    while len(line) - start > MAX_LINE_BYTES:
        end = _character_start(line, start + MAX_LINE_BYTES)
        pieces.append(line[start:end])
        start = end
    return [*pieces, line[start:]]


def _character_start(line: bytes, at: int) -> int:
    """Return where the character at `at` begins; `at` itself where that is no UTF-8."""
    for start in range(at, at - _LONGEST_CHARACTER, -1):
        if line[start] & _CONTINUATION_MASK != _CONTINUATION:
            return start
    return at
