# SPDX-License-Identifier: Apache-2.0
"""A `numactl` of a test's own: it notes its words and runs the command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROGRAM = """#!/bin/sh
words=
while [ "${1#--}" != "$1" ]; do
    case $1 in
    --localalloc | --*=*) words="$words $1"; shift ;;
    *) words="$words $1 $2"; shift 2 ;;
    esac
done
echo $words >> "$FAKE_NUMACTL_LOG"
exec "$@"
"""


class NumactlStub:
    """The program in a folder of its own, and what it was called with."""

    def __init__(self, folder: Path) -> None:
        """Make it below an existing folder."""
        self._log = folder / "numactl.log"
        self._folder = folder / "numactl"
        self._folder.mkdir()
        program = self._folder / "numactl"
        program.write_text(_PROGRAM)
        program.chmod(0o755)

    def environment(self) -> Mapping[str, str]:
        """Return the variables with which it is found before the real one."""
        return {
            "FAKE_NUMACTL_LOG": str(self._log),
            "PATH": f"{self._folder}:{os.environ['PATH']}",
        }

    def calls(self) -> list[str]:
        """Return the options of each call, sorted."""
        return sorted(self._log.read_text().splitlines())
