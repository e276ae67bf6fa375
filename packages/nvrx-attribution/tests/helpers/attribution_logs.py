# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - texts of logs, and patterns for them, stay on one line
"""Make labelled logs of failed and healthy jobs: several ranks, dialects, cascades, noise.

A case is made from a seed. Each kind of fault has several wordings; which one is used, the
dialect of the prefixes, the victim, the noise and the order are drawn. The label says the code,
the actions that are right, the rank, the node (when the log tells it) and the line.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

DIALECTS = ("srun", "bracket", "default", "logging", "both", "glog", "json")


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        code: The right reason code.
        actions: What is right, when steps were completed before.
        wordings: Each a text with `{r}`, `{n}`, `{x}` for rank, node and a number.
        who: `one`, `all`, `kernel`, `slurm` or `hang`: who writes it.
        early: It strikes before the first step; `early_actions` are right then.
        in_traceback: The text is the last line of a Python traceback.
    """

    code: str
    actions: tuple[str, ...]
    wordings: tuple[str, ...]
    who: str = "one"
    early: bool = False
    early_actions: tuple[str, ...] | None = None
    in_traceback: bool = True
    exit_code: int = 1


R, S = ("RESTART",), ("STOP",)
FAULTS = {
    "cuda_oom": Fault(
        "gpu.oom",
        R,
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {x}.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate {x} MiB (GPU 3; 79.15 GiB total capacity)",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
    ),
    "cuda_oom_early": Fault(
        "gpu.oom",
        S,
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {x}.00 GiB.",
            "RuntimeError: CUDA error: out of memory",
        ),
        "all",
        early=True,
    ),
    "off_bus": Fault(
        "gpu.off_bus",
        R,
        (
            "NVRM: Xid (PCI:0000:{x:02x}:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "NVRM: GPU 0000:{x:02x}:00.0: GPU has fallen off the bus.",
        ),
        "kernel",
        in_traceback=False,
    ),
    "ecc": Fault(
        "gpu.ecc_uncorrectable",
        R,
        (
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        ),
    ),
    "xid48": Fault(
        "gpu.ecc_uncorrectable",
        R,
        (
            "NVRM: Xid (PCI:0000:{x:02x}:00): 48, pid=4242, An uncorrectable double bit error (DBE) has been detected",
            "NVRM: Xid (PCI:0000:{x:02x}:00): 95, pid=4242, Uncontained: LTC TAG",
        ),
        "kernel",
        in_traceback=False,
    ),
    "nvlink": Fault(
        "gpu.nvlink",
        R,
        (
            "NVRM: Xid (PCI:0000:{x:02x}:00): 74, pid=1234, NVLink: fatal error detected on link 7(0x0, 0x0)",
            "NVRM: Xid (PCI:0000:{x:02x}:00): 145, NVLINK: RLW error",
        ),
        "kernel",
        in_traceback=False,
    ),
    "gsp": Fault(
        "gpu.gsp",
        R,
        (
            "NVRM: Xid (PCI:0000:{x:02x}:00): 119, pid=777, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
            "NVRM: Xid (PCI:0000:{x:02x}:00): 120, GSP task exception",
        ),
        "kernel",
        in_traceback=False,
    ),
    "illegal": Fault(
        "gpu.illegal_access",
        R,
        (
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        ),
    ),
    "launch": Fault(
        "gpu.launch_failure",
        R,
        (
            "RuntimeError: CUDA error: unspecified launch failure",
            "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            "RuntimeError: CUDA error: misaligned address",
        ),
    ),
    "gpu_init": Fault(
        "gpu.init_failure",
        R,
        (
            "RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.",
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
            "RuntimeError: No CUDA GPUs are available",
        ),
        early=True,
    ),
    "hang": Fault("nccl.timeout", R, ("",), "hang", in_traceback=False),
    "ib": Fault(
        "net.ib_transport",
        R,
        (
            "NCCL WARN NET/IB : Got completion from peer 10.4.0.{x}<47010> with status=12 opcode=0 len=0 vendor err 129 (Recv)",
            "NCCL WARN NET/IB: mlx5_1:1 Got completion from peer 10.4.0.{x}<47010> with status=5 opcode=1 len=32 vendor err 244",
        ),
        in_traceback=False,
    ),
    "link_down": Fault(
        "net.link_down",
        R,
        (
            "NCCL WARN NET/IB : mlx5_{x}:1 Got async event : port error",
            "NCCL WARN NET/IB : mlx5_{x}:1 Got async fatal event: port error",
        ),
        in_traceback=False,
    ),
    "rendezvous": Fault(
        "net.rendezvous",
        R,
        (
            "torch.distributed.DistStoreError: Timed out after {x} seconds waiting for clients. 7/8 clients joined.",
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        ),
        early=True,
    ),
    "port": Fault(
        "net.port_in_use",
        R,
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
            "OSError: [Errno 98] Address already in use",
        ),
        early=True,
    ),
    "external": Fault(
        "net.external_service",
        R,
        (
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api/models/x",
            'botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: "https://s3.local/bucket"',
            "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://hub.local/model",
        ),
    ),
    "host_oom": Fault(
        "host.oom",
        R,
        (
            "Memory cgroup out of memory: Killed process {x}4242 (python) total-vm:91234kB, anon-rss:81234kB",
            "Out of memory: Killed process {x}4242 (python3) total-vm:91234kB, anon-rss:81234kB, file-rss:0kB",
        ),
        "kernel",
        in_traceback=False,
        exit_code=-9,
    ),
    "memory_error": Fault(
        "host.oom",
        R,
        (
            "MemoryError",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate {x}0000000 bytes. Error code 12 (Cannot allocate memory)",
            "numpy.core._exceptions.MemoryError: Unable to allocate {x}.0 GiB for an array",
        ),
    ),
    "sigkill": Fault("host.sigkill", R, ("",), "exit", in_traceback=False, exit_code=-9),
    "segfault": Fault(
        "host.segfault",
        R,
        (
            "Fatal Python error: Segmentation fault",
            "*** Process received signal *** Signal: Segmentation fault (11)",
        ),
        in_traceback=False,
        exit_code=-11,
    ),
    "shm": Fault(
        "host.shm",
        R,
        (
            "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_{x}>: No space left on device (28)",
        ),
    ),
    "fds": Fault(
        "host.fd_limit",
        R,
        (
            "OSError: [Errno 24] Too many open files: '/data/shard-{x}.bin'",
            "RuntimeError: Too many open files. Communication with the workers is no longer possible.",
        ),
    ),
    "no_space": Fault(
        "storage.no_space",
        R,
        (
            "OSError: [Errno 28] No space left on device: '/ckpt/iter_{x}/model.pt'",
            "OSError: [Errno 122] Disk quota exceeded: '/home/u/run/{x}'",
        ),
    ),
    "io_error": Fault(
        "storage.io_error",
        R,
        (
            "OSError: [Errno 5] Input/output error: '/lustre/data/part-{x}.bin'",
            "OSError: [Errno 116] Stale file handle: '/nfs/data/part-{x}.bin'",
            "OSError: [Errno 107] Transport endpoint is not connected: '/lustre/x/{x}'",
        ),
    ),
    "permission": Fault(
        "storage.permission",
        S,
        (
            "PermissionError: [Errno 13] Permission denied: '/results/run{x}'",
            "OSError: [Errno 13] Permission denied: '/results/{x}'",
        ),
        early=True,
    ),
    "not_found": Fault(
        "data.not_found",
        S,
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/corpus/part-{x}.idx'",
            "FileNotFoundError: dataset path /data/mix/blend{x}.json does not exist",
        ),
        early=True,
    ),
    "corrupt_data": Fault(
        "data.corrupt",
        R,
        (
            "zipfile.BadZipFile: Bad CRC-32 for file 'sample{x}.jpg' in /data/shard-{x}.zip",
            "PIL.UnidentifiedImageError: cannot identify image file '/data/img/{x}.jpg'",
            "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer of /data/p{x}.parquet",
        ),
    ),
    "worker_killed": Fault(
        "data.worker_killed",
        R,
        (
            "RuntimeError: DataLoader worker (pid(s) {x}123) exited unexpectedly",
            "RuntimeError: DataLoader worker (pid {x}123) is killed by signal: Killed.",
        ),
    ),
    "ckpt_shape": Fault(
        "ckpt.incompatible",
        S,
        (
            "RuntimeError: Error(s) in loading state_dict for GPTModel:",
            "megatron.core.dist_checkpointing.core.CheckpointingException: Global shape mismatch for loaded (torch.Size([{x}])) and expected ((8,)) tensor for key w",
        ),
        "all",
        early=True,
    ),
    "ckpt_corrupt": Fault(
        "ckpt.corrupt",
        R,
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "_pickle.UnpicklingError: pickle data was truncated",
        ),
        early=True,
    ),
    "nan": Fault(
        "num.nan",
        R,
        (
            "AssertionError: Rank {r}: found NaN in local forward loss calculation. Device: {x}, node: n",
            "ValueError: loss is NaN at step {x}, aborting",
            "RuntimeError: Unexpected result nan (message='found NaN in local forward loss calculation')",
        ),
    ),
    "import": Fault(
        "user.import_error",
        S,
        (
            "ModuleNotFoundError: No module named 'mylib{x}'",
            "ImportError: cannot import name 'fused_{x}' from 'kernels' (/app/kernels.py)",
            "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        ),
        "all",
        early=True,
    ),
    "syntax": Fault(
        "user.syntax_error",
        S,
        (
            "SyntaxError: invalid syntax",
            "IndentationError: unexpected indent",
        ),
        "all",
        early=True,
    ),
    "config": Fault(
        "user.config_error",
        S,
        (
            "train.py: error: unrecognized arguments: --micro-batch-sise {x}",
            "AssertionError: world size ({x}) is not divisible by tensor_model_parallel_size (7)",
            "ValueError: hidden_size {x} must be divisible by num_attention_heads",
            "omegaconf.errors.ConfigAttributeError: Key 'lr{x}' is not in struct",
        ),
        "all",
        early=True,
    ),
    "shape": Fault(
        "user.shape_error",
        S,
        (
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied ({x}x8 and 16x4)",
            "RuntimeError: The size of tensor a ({x}) must match the size of tensor b (4) at non-singleton dimension 1",
        ),
        "all",
        early=True,
    ),
    "code": Fault(
        "user.code_error",
        S,
        (
            "AttributeError: 'NoneType' object has no attribute 'shape{x}'",
            "TypeError: forward() got an unexpected keyword argument 'mask{x}'",
            "KeyError: 'input_ids{x}'",
            "NameError: name 'lr{x}' is not defined",
        ),
        "all",
        early=True,
    ),
    "mismatch": Fault(
        "user.collective_mismatch",
        S,
        (
            "RuntimeError: Detected mismatch between collectives on ranks. Rank {r} is running collective: CollectiveFingerPrint(SequenceNumber={x}, OpType=ALLREDUCE)",
            "RuntimeError: Mismatched collective detected on rank {r}: allreduce vs broadcast",
        ),
    ),
    "device_assert": Fault(
        "user.device_assert",
        R,
        (
            "RuntimeError: CUDA error: device-side assert triggered",
            "torch.AcceleratorError: CUDA error: device-side assert triggered",
        ),
    ),
    "auth": Fault(
        "user.auth",
        S,
        (
            "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://hub/x{x}",
            "huggingface_hub.errors.GatedRepoError: 403 Client Error. Cannot access gated repo for url https://hub/y",
            "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        ),
        "all",
        early=True,
    ),
    "exception": Fault(
        "user.exception",
        R,
        (
            "RuntimeError: the sampler state of epoch {x} went away",
            "megatron.app.errors.SchedulerException: unknown phase {x}",
            "AssertionError: buffer {x} was not drained",
        ),
    ),
    "preempted": Fault(
        "sched.preempted",
        R,
        (
            "slurmstepd: error: *** JOB {x}77 ON {n} CANCELLED AT 2026-01-02T10:10:00 DUE TO PREEMPTION ***",
            "slurmstepd: error: *** STEP {x}77.0 ON {n} CANCELLED AT 2026-01-02T10:10:00 DUE TO PREEMPTION ***",
        ),
        "slurm",
        in_traceback=False,
    ),
    "node_fail": Fault(
        "sched.node_fail",
        R,
        (
            "slurmstepd: error: *** STEP {x}77.0 ON {n} CANCELLED AT 2026-01-02T10:10:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
            "srun: error: Node failure on {n}",
        ),
        "slurm",
        in_traceback=False,
    ),
    "time_limit": Fault(
        "sched.time_limit",
        S,
        (
            "slurmstepd: error: *** JOB {x}77 ON {n} CANCELLED AT 2026-01-02T10:10:00 DUE TO TIME LIMIT ***",
            "slurmstepd: error: *** STEP {x}77.0 ON {n} CANCELLED AT 2026-01-02T10:10:00 DUE TO TIME LIMIT ***",
        ),
        "slurm",
        in_traceback=False,
    ),
    "heartbeat": Fault(
        "hang.heartbeat",
        R,
        (
            "rank {r} (pid {x}77) sent no heartbeat for {x} s (limit 60 s): it is killed",
            "rank {r} (pid {x}77) was in section 'step' for {x} s (limit 60 s): it is killed",
        ),
        "launcher",
        in_traceback=False,
    ),
}
HEALTHY = ("healthy_running", "healthy_done", "healthy_recovered")


@dataclass
class Case:
    """A log with its label."""

    kind: str
    text: str
    code: str
    actions: tuple[str, ...]
    rank: int | None = None
    node: str | None = None
    line: int | None = None
    has_node: bool = False


@dataclass
class Writer:
    """Collects lines with the prefixes of one dialect."""

    rng: random.Random
    dialect: str
    per_node: int
    seconds: float = 0.0
    lines: list[tuple[str, str]] = field(default_factory=list)

    def stamp(self) -> str:
        self.seconds += self.rng.random() * 0.4
        whole = int(self.seconds)
        return f"{10 + whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"

    def node(self, rank: int) -> str:
        return f"gpu-{rank // self.per_node:03d}"

    def write(self, rank: int, text: str, mark: str = "", level: str = "INFO") -> None:
        stamp = self.stamp()
        milli = self.rng.randrange(1000)
        if self.dialect == "srun":
            line = f"{rank}: {text}"
        elif self.dialect == "bracket":
            line = f"[rank{rank}]: {text}"
        elif self.dialect == "default":
            line = f"[{self.node(rank)}:{rank % self.per_node}] {text}"
        elif self.dialect == "logging":
            line = f"{rank}: 2026-01-02 {stamp},{milli:03d} {level} {text}"
        elif self.dialect == "both":
            line = f"{rank}: [rank{rank}]: {text}"
        elif self.dialect == "glog":
            line = f"[rank{rank}]:[{level[0]}102 {stamp}.{milli:03d}000000 app.cpp:{milli}] {text}"
            line = line.replace(f":[{level[0]}102", f":[{level[0]}0102")
        else:
            line = json.dumps(
                {
                    "log": f"[rank{rank}]: {text}\n",
                    "stream": "stderr",
                    "time": f"2026-01-02T{stamp}.{milli:03d}Z",
                    "kubernetes": {"host": self.node(rank)},
                }
            )
        self.lines.append((line, mark))

    def bare(self, text: str, mark: str = "") -> None:
        self.stamp()
        self.lines.append((text, mark))


NOISE = (
    "UserWarning: The given buffer is not writable, and PyTorch does not support non-writable tensors.",
    "retrying the download of tokenizer.json in {x} s after ConnectionError",
    "nan_count=0 inf_count=0 step ok",
    "health check passed: 0 errors, 0 warnings",
    "gradient clipping is on; error feedback disabled",
    "dataset cache hit for shard {x}",
    "NCCL INFO Channel {x:02d}/16 : 0 1 2 3",
    "compiled kernel fused_error_function_{x} in 0.1 s",
    "number of failed health probes so far: 0",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated.",
    "[Gloo] Rank {x} is connected to 7 peer ranks. Expected number of connected peer ranks is : 7",
)
CASCADES = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2094, remote process exited or there was a network error, NCCL version 2.27.3",
    "NCCL WARN [Service thread] Accept failed Resource temporarily down; Connection closed by remote peer",
    "[W TCPStore.cpp:125] recvValue failed on SocketImpl(fd=8): Failed to recv, got 0 bytes. Connection was likely closed.",
    "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.3]:2211 gloo",
    "terminate called after throwing an instance of 'c10::DistBackendError'",
)


def make_case(kind: str, seed: int, *, is_small: bool = False, twist: str = "") -> Case:
    """Return one labelled log, reproducible by its arguments.

    Args:
        kind: Of fault, or of healthy job.
        seed: Draws everything else.
        is_small: At most 16 ranks.
        twist: `recovered`: another fault came before that the job survived; `late`: the fault is
            written after what it led to; `twice`: another rank has a fault of its own soon after.
    """
    rng = random.Random(f"log {kind} {seed}")
    per_node = rng.choice([4, 8])
    world = per_node * rng.choice([2, 4, 8])
    world = 2 * per_node if is_small else world
    dialect = rng.choice(DIALECTS)
    out = Writer(rng, dialect, per_node, seconds=rng.random() * 3000)
    knows_nodes = dialect in {"default", "json"} or rng.random() < 0.5
    start(out, world, knows_nodes)
    if kind in HEALTHY:
        return healthy(kind, out, world, rng)
    fault = FAULTS[kind]
    victim = rng.randrange(world)
    steps = 0 if fault.early else rng.randint(3, 20)
    if steps and (rng.random() < 0.25 or twist == "recovered"):
        train(out, world, 0, 2)
        recover(out, rng.randrange(world))
        train(out, world, 2, steps + 4)
    else:
        train(out, world, 0, steps)
    if twist == "late":
        out.dialect = "logging"  # only times tell
    line_rank = strike(out, fault, kind, victim, world, rng, twist)
    text = "\n".join(line for line, _ in out.lines) + "\n"
    marked = [number for number, (_, mark) in enumerate(out.lines, 1) if mark == "fault"]
    actions = fault.early_actions or fault.actions if fault.early else fault.actions
    node = out.node(victim) if knows_nodes or fault.who in {"kernel", "slurm"} else None
    return Case(
        kind,
        text,
        fault.code,
        actions,
        line_rank,
        node,
        marked[0] if marked else None,
        node is not None and fault.who != "all",
    )


def start(out: Writer, world: int, knows_nodes: bool) -> None:
    out.bare("launching job")
    for rank in range(world):
        if knows_nodes:
            local = rank % out.per_node
            out.bare(
                f"{out.node(rank)}:{4000 + rank}:{5000 + rank} [{local}] NCCL INFO comm 0x55 rank"
                f" {rank} nranks {world} cudaDev {local} busId 1000 - Init COMPLETE"
            )
        if out.rng.random() < 0.4:
            noise(out, rank)
    out.write(0, f"using world size: {world}, data-parallel size: 2")


def noise(out: Writer, rank: int) -> None:
    out.write(rank, out.rng.choice(NOISE).format(x=out.rng.randrange(1, 90)), level="WARNING")


def train(out: Writer, world: int, first: int, last: int) -> None:
    for step in range(first, last):
        out.seconds += 2
        out.write(
            world - 1,
            f"iteration {step + 1:8d}/ 500000 | consumed samples: {step * 64} | elapsed time per"
            f" iteration (ms): 812.1 | lm loss: 2.1E+00 | grad norm: 1.2 | number of nan iterations: 0 |",
        )
        if out.rng.random() < 0.3:
            noise(out, out.rng.randrange(world))


def recover(out: Writer, rank: int) -> None:
    text = out.rng.choice(
        (
            "OSError: [Errno 5] Input/output error: '/lustre/tmp/x.bin'",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "requests.exceptions.ConnectionError: Max retries exceeded with url: /metrics",
        )
    )
    traceback(out, rank, text, "")


def traceback(out: Writer, rank: int, text: str, mark: str, entity: str = "step") -> None:
    out.write(rank, "Traceback (most recent call last):", level="ERROR")
    out.write(
        rank, f'  File "/app/train.py", line {out.rng.randrange(400)}, in main', level="ERROR"
    )
    out.write(rank, "    run(args)", level="ERROR")
    if out.rng.random() < 0.3:
        other = (rank + 1) % 8
        noise(out, other if other != rank else 0)
    out.write(
        rank,
        f'  File "/app/lib/{entity}.py", line {out.rng.randrange(400)}, in {entity}',
        level="ERROR",
    )
    out.write(rank, "    return inner(batch)", level="ERROR")
    out.write(rank, text, mark, level="ERROR")


def strike(  # noqa: C901, PLR0912, PLR0913, PLR0915, PLR0917 - one branch per writer of a fault
    out: Writer, fault: Fault, kind: str, victim: int, world: int, rng, twist: str = ""
) -> int | None:
    """Write the fault, its cascades and the end; return the rank of the label."""
    values = {"r": victim, "n": out.node(victim), "x": rng.randrange(1, 99)}
    text = rng.choice(fault.wordings).format(**values)
    if fault.who == "hang":
        out.seconds += 600
        seq = rng.randrange(100, 999)
        for rank in range(world):
            if rank != victim:
                out.write(
                    rank,
                    f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq},"
                    f" OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for"
                    f" 600{rank:03d} milliseconds before timing out.",
                    "any",
                    "ERROR",
                )
        teardown(out, victim, fault, world, rng, blocks=False)
        return victim
    late = rng.random() < 0.15 and fault.who == "one" and out.dialect in {"logging", "glog", "json"}
    late = late or twist == "late"
    if fault.who == "kernel":
        out.bare(f"Jan  2 {out.stamp()} {out.node(victim)} kernel: [ 123.456789] {text}", "fault")
        out.seconds += 3
        if kind != "host_oom":
            traceback(out, victim, "RuntimeError: CUDA error: unspecified launch failure", "")
        cascade(out, victim, world, rng)
        teardown(out, victim, fault, world, rng)
        return victim
    if fault.who == "slurm":
        out.bare(text, "fault")
        for rank in rng.sample(range(world), 3):
            out.write(rank, "Received SIGTERM: 15", level="WARNING")
        out.bare("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.")
        return None
    if fault.who == "all":
        ranks = list(range(world))
        rng.shuffle(ranks)
        for rank in ranks:
            shown = text
            if fault.in_traceback and not text.startswith("train.py"):
                traceback(out, rank, shown, "fault", "setup")
            else:
                out.write(rank, shown, "fault")
        teardown(out, ranks[0], fault, world, rng)
        return None
    if fault.who == "launcher":
        out.bare(f"2026-01-02 {out.stamp()},001 ERROR nvrx {text}", "fault")
        cascade(out, victim, world, rng)
        teardown(out, victim, fault, world, rng, blocks=False)
        return victim
    if fault.who == "exit":
        cascade(out, victim, world, rng)
        teardown(out, victim, fault, world, rng)
        return victim
    held = len(out.lines)
    before = out.seconds
    if fault.in_traceback:
        traceback(out, victim, text, "fault", rng.choice(("step", "data", "model")))
    else:
        out.write(victim, text, "fault", "ERROR")
    mine = out.lines[held:]
    if late:
        del out.lines[held:]
    out.seconds = max(out.seconds, before + 4)
    if twist == "twice":
        out.seconds += 5
        for rank in range(4):
            noise(out, rank)
        traceback(
            out, (victim + 1) % world, "OSError: [Errno 28] No space left on device: '/tmp/x'", ""
        )
    cascade(out, victim, world, rng)
    if late:
        out.lines += mine
    teardown(out, victim, fault, world, rng)
    return victim


def cascade(out: Writer, victim: int, world: int, rng) -> None:
    for rank in rng.sample(range(world), min(world, rng.randint(2, 6))):
        if rank == victim:
            continue
        text = rng.choice(CASCADES)
        if "Error:" in text.split()[0] or text.startswith("torch."):
            traceback(out, rank, text, "", "reduce")
        else:
            out.write(rank, text, level="ERROR")


def teardown(
    out: Writer, victim: int, fault: Fault, world: int, rng, *, blocks: bool = True
) -> None:
    out.seconds += 2
    stamp = out.stamp()
    out.bare(
        f"W0102 {stamp}.000000 140 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 4242 closing signal SIGTERM"
    )
    if not blocks:
        out.bare("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.")
        return
    local = victim % out.per_node
    mark = "fault" if fault.who == "exit" else ""
    out.bare(
        f"E0102 {stamp}.100000 140 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {fault.exit_code}) local_rank: {local} (pid: 4242) of binary: /usr/bin/python",
        mark,
    )
    out.bare("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
    out.bare("============================================================")
    out.bare("train.py FAILED")
    out.bare("Root Cause (first observed failure):")
    out.bare("[0]:")
    out.bare(f"  time      : 2026-01-02_{stamp}")
    out.bare(f"  host      : {out.node(victim)}")
    out.bare(f"  rank      : {victim} (local_rank: {local})")
    out.bare(f"  exitcode  : {fault.exit_code} (pid: 4242)", mark)
    out.bare("  error_file: <N/A>")
    out.bare(
        "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    )


def healthy(kind: str, out: Writer, world: int, rng) -> Case:
    train(out, world, 0, 6)
    if kind == "healthy_recovered":
        recover(out, rng.randrange(world))
    train(out, world, 6, 14)
    if kind == "healthy_done":
        out.write(0, "[after training is done] datetime: 2026-01-02 10:00:00")
    text = "\n".join(line for line, _ in out.lines) + "\n"
    if kind == "healthy_done":
        return Case(kind, text, "done.completed", ("CONTINUE",))
    return Case(kind, text, "unknown", ("RESTART", "CONTINUE"))
