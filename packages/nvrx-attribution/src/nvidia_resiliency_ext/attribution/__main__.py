# SPDX-License-Identifier: Apache-2.0
"""`python -m nvidia_resiliency_ext.attribution` is the program `nvrx-attribution`."""

import sys

from nvidia_resiliency_ext.attribution.cli import main

if __name__ == "__main__":
    sys.exit(main())
