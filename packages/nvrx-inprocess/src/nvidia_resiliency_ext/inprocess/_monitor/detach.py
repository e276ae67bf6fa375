# SPDX-License-Identifier: Apache-2.0
"""Runs a program that is nobody's child: `python -I -S detach.py PROGRAM ARGUMENTS...`.

A fresh interpreter without any of our packages, so that its fork is harmless. The parent reaps it
at once; the program itself has no parent to which its end could matter.
"""

import os
import sys

if __name__ == "__main__":
    os.umask(0o077)
    os.chdir("/")
    if os.fork() == 0:
        os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - that is the point
