# SPDX-License-Identifier: Apache-2.0
"""CRC-32 of large buffers, as in zip files, and of joined pieces; it reads no files.

`crc32` gives what `zlib.crc32` gives. With isal (extra `fast`), which multiplies without carries in
one instruction, it is about seven times as fast. With numpy alone it is almost twice as fast: the
polynomial of CRC-32 divides x^91639 + x^41678 + 1, and therefore, squaring eight times, also that
trinomial of whole bytes. So a byte may be taken away from a message and added (XOR) to two later
ones without changing the checksum, which numpy does for 50 KB at a time in the cache.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_POLYNOMIAL = 0xEDB88320
_FAR = 91639
_NEAR = _FAR - 41678
_FOLD_BYTES = 1 << 20
_BLOCKS = 8
_MASK = 0xFFFFFFFF


def crc32(data: Any, value: int = 0) -> int:
    """Return the CRC-32 of a buffer, going on from that of what came before it.

    Args:
        data: Bytes or any contiguous buffer.
        value: Checksum of the bytes in front of them; 0 for none.

    Example:
        >>> hex(crc32(b"123456789"))
        '0xcbf43926'
    """
    if memoryview(data).nbytes < _FOLD_BYTES:
        return zlib.crc32(data, value)
    return _best()(data, value)


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two pieces joined, from those of the pieces.

    Args:
        first: Checksum of the first piece.
        second: Checksum of the second piece alone.
        second_bytes: Length of the second piece.
    """
    return _multiply(_shift(second_bytes), first) ^ second


@functools.lru_cache(maxsize=1)
def _best() -> Callable[[Any, int], int]:
    """Return the fastest of those that are installed; some builds of zlib use the processor's."""
    sample = bytes(2 * _FOLD_BYTES)
    return min(
        _candidates(), key=lambda function: min(_seconds(function, sample) for _ in range(3))
    )


def _candidates() -> list[Callable[[Any, int], int]]:
    candidates: list[Callable[[Any, int], int]] = [zlib.crc32]
    with contextlib.suppress(ImportError):
        candidates.append(_make_fold())
    with contextlib.suppress(ImportError):
        from isal import isal_zlib

        candidates.append(isal_zlib.crc32)
    return candidates


def _seconds(function: Callable[[Any, int], int], sample: bytes) -> float:
    begin = time.perf_counter()
    function(sample, 0)
    return time.perf_counter() - begin


def _make_fold() -> Callable[[Any, int], int]:
    import numpy as np

    local = threading.local()

    def fold(data: Any, value: int) -> int:
        message = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        if not hasattr(local, "window"):
            local.window = np.empty(_FAR + _BLOCKS * _NEAR, np.uint8)
        window = local.window
        window[:_FAR] = 0
        end, taken = _FAR, 0
        while len(message) - taken - _NEAR >= _FAR:
            if end + _NEAR > len(window):
                window[:_FAR] = window[end - _FAR : end]
                end = _FAR
            block = window[end : end + _NEAR]
            far = window[end - _FAR : end - _FAR + _NEAR]
            np.bitwise_xor(far, window[end - _NEAR : end], out=block)
            np.bitwise_xor(block, message[taken : taken + _NEAR], out=block)
            if taken == 0:
                # The register that zlib would start with, as if it stood in the message.
                block[:4] ^= np.frombuffer((value ^ _MASK).to_bytes(4, "little"), np.uint8)
            end, taken = end + _NEAR, taken + _NEAR
        rest = message[taken:].copy()
        rest[:_NEAR] ^= window[end - _NEAR : end]
        rest[:_FAR] ^= window[end - _FAR : end]
        return zlib.crc32(rest, _MASK)

    return fold


@functools.lru_cache(maxsize=4096)
def _shift(count: int) -> int:
    """Return x^(8 * count) modulo the polynomial, bits reversed as CRC-32 has them."""
    result, power = 1 << 31, 1 << 23
    while count:
        if count & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        count >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    product = 0
    bit = 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
