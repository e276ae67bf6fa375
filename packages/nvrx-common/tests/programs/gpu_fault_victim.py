# SPDX-License-Identifier: Apache-2.0
"""Works on a GPU, gets one fault, and tells what it sees of it.

usage: gpu_fault_victim.py FAULT
"""

import os
import resource
import sys
import time

import torch

from nvidia_resiliency_ext.shared_utils.inject_fault import Fault, dispatch_fault_injection


def step(values, fault):
    """Do some work, and return what came of it and what there is to say."""
    time.sleep(0.05)
    try:
        if fault is Fault.OOM_GPU:
            values = torch.empty(1 << 28, device="cuda")
        values = values + 1
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return values, "memory"
    except RuntimeError:
        return values, "error"
    return values, "step"


resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
work, word = torch.ones(1 << 20, device="cuda"), "step"
torch.cuda.synchronize()
kind = Fault[sys.argv[1]]
dispatch_fault_injection(kind, 0.1)
end = time.monotonic() + 30
while word == "step" and time.monotonic() < end:
    work, word = step(work, kind)
    print(word, flush=True)
os._exit(0)
