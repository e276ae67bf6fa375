# SPDX-License-Identifier: Apache-2.0
"""Plugin of pytest: with `--hostile` tests run with what a careless shell may leave to a program.

Signals that `nohup` and a script's `&` ignore, no umask, the C locale, an odd time zone, output
without a buffer (as in containers), a temporary directory whose path is too long for a socket, no
home, a working directory with blanks, and few descriptors. Processes that tests start inherit all
of it.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
import time

import pytest

_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_ENVIRONMENT = {"LC_ALL": "C", "PYTHONUNBUFFERED": "1", "TZ": "CHAST-12:45CHADT"}
_UNSET = ("HOME", "LANG", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR")
_DESCRIPTORS = 256
_LONG = "a-temporary-directory-whose-path-is-longer-than-the-address-of-a-socket"
_ODD = "working directory, çà et là"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--hostile`."""
    parser.addoption("--hostile", action="store_true", help="run with what a careless shell leaves")


def pytest_configure(config: pytest.Config) -> None:
    """Change this process before a test is collected; workers of xdist inherit nearly all."""
    if not config.getoption("hostile"):
        return
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(config, "workerinput"):
        return
    os.umask(0)
    os.environ.update(_ENVIRONMENT)
    time.tzset()
    for name in _UNSET:
        os.environ.pop(name, None)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, hard))
    top = tempfile.mkdtemp(prefix="nvrx-hostile-")
    config.add_cleanup(lambda: shutil.rmtree(top, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = os.path.join(top, _LONG, _LONG)
    os.makedirs(tempfile.tempdir, mode=0o1777)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the working directory; until now the names of files were relative to it."""
    if session.config.getoption("hostile"):
        place = os.path.join(os.environ["TMPDIR"], _ODD)
        os.makedirs(place, exist_ok=True)
        os.chdir(place)
