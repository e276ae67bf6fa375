# SPDX-License-Identifier: Apache-2.0
"""Becomes an ordinary user that may read every folder, then runs the command that follows.

Reading is kept because an interpreter may be installed where only root can look.
"""

import ctypes
import os
import sys

USER = 65534
CAP_DAC_READ_SEARCH = 2
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 47, 2
CAPABILITY_VERSION_3 = 0x20080522


def main():
    """Change the user, keep one capability, and become the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    kept = 1 << CAP_DAC_READ_SEARCH
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
