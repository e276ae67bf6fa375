# SPDX-License-Identifier: Apache-2.0
"""Host a store at any port, which is printed, until the input ends."""

import sys

from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
