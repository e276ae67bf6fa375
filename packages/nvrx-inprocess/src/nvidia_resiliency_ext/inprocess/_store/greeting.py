# SPDX-License-Identifier: Apache-2.0
"""How one of torch's TCPStores is told from anything else that listens; without torch.

The store is asked to change a key that nobody has from a random value: it changes nothing and says
that value back, in every version (tried with 2.4.0 and 2.13.0). torch's own ping is younger: a
server of 2.4 hangs up.
"""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["greet"]

_VALIDATE, _COMPARE_SET = b"\0", b"\2"
_MAGIC = struct.pack("=I", 0x3C85F7CE)
_LENGTH = struct.Struct("=q")
_WORD_BYTES = 16
_KEY = b"/nvrx/greeting/"  # torch puts a slash before all keys


def greet(connection: socket.socket) -> bool:
    """Begin as torch's clients do; return whether a store of torch's is at the other end.

    Raises:
        TimeoutError: Nothing was said within the connection's timeout.
        OSError: The connection was ended.
    """
    word = os.urandom(_WORD_BYTES).hex().encode()
    key, value = _text(_KEY + word), _text(word)
    connection.sendall(_VALIDATE + _MAGIC + _COMPARE_SET + key + value + value)
    answer = b""
    while answer != value:
        part = connection.recv(len(value) - len(answer))
        answer += part
        if not part or not value.startswith(answer):
            return False
    return True


def _text(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value
