# SPDX-License-Identifier: Apache-2.0
"""`python -m nvidia_resiliency_ext.services.attrsvc` is the program `nvrx-attrsvc`."""

import sys

from nvidia_resiliency_ext.services.attrsvc.server import main

if __name__ == "__main__":
    sys.exit(main())
