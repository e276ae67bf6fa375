# SPDX-License-Identifier: Apache-2.0
"""`python -m nvidia_resiliency_ext.services.smonsvc` is the program `nvrx-smonsvc`."""

import sys

from nvidia_resiliency_ext.services.smonsvc.program import main

if __name__ == "__main__":
    sys.exit(main())
