# SPDX-License-Identifier: Apache-2.0
"""Train a small model on the CPU with all packages at once, each switched on as in Megatron-LM.

Flags have the names of Megatron-LM's arguments, except `--log-straggler`, which there switches on a
detector of its own. Without any of them this is a plain DDP training.

    ft_launcher --standalone --nproc-per-node 3 --max-restarts 3 pretrain.py --save /tmp/run \
        --async-save --use-persistent-ckpt-worker --save-interval 10 \
        --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir /dev/shm/run \
        --non-persistent-save-interval 3 --replication --replication-jump 1 \
        --enable-ft-package --calc-ft-timeouts --log-straggler \
        --inprocess-restart --inprocess-active-world-size 2 \
        --fault-injector-ranks 1 --fault-injector-fault-types sigkill \
        --fault-injector-delay-start-iteration 14

The last line of rank 0 is the result: the same with and without faults.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.attribution import straggler
from nvidia_resiliency_ext.checkpointing import publish_latest, read_latest
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
)
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from nvidia_resiliency_ext.shared_utils.inject_fault import (
    Fault,
    dispatch_fault_injection,
    maybe_raise_workload_exception,
    workload_raise_event,
)

CYCLE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
FAULT_DEADLINE_S = 120.0


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train-iters", type=int, default=30)
    parser.add_argument("--save", type=Path, required=True, help="folder of global checkpoints")
    parser.add_argument("--save-interval", type=int, default=10, help="iterations")
    parser.add_argument("--async-save", action="store_true", help="write in the background")
    parser.add_argument("--use-persistent-ckpt-worker", action="store_true")
    parser.add_argument("--non-persistent-ckpt-type", choices=["local"])
    parser.add_argument("--non-persistent-local-ckpt-dir", type=Path)
    parser.add_argument("--non-persistent-save-interval", type=int, default=3, help="iterations")
    parser.add_argument("--replication", action="store_true", help="of local checkpoints")
    parser.add_argument("--replication-jump", type=int, default=1, help="distance in ranks")
    parser.add_argument("--replication-factor", type=int, default=2, help="copies in all")
    parser.add_argument("--enable-ft-package", action="store_true", help="sections for the monitor")
    parser.add_argument("--calc-ft-timeouts", action="store_true", help="learn their timeouts")
    parser.add_argument("--ft-num-warmup-iters", type=int, default=5)
    parser.add_argument("--log-straggler", action="store_true", help="report slow ranks")
    parser.add_argument("--inprocess-restart", action="store_true")
    parser.add_argument("--inprocess-active-world-size", type=int, default=1)
    parser.add_argument("--inprocess-soft-timeout", type=float, default=60, help="seconds")
    parser.add_argument("--inprocess-hard-timeout", type=float, default=90, help="seconds")
    parser.add_argument("--inprocess-last-call-wait", type=float, default=1, help="seconds")
    parser.add_argument("--fault-injector-ranks", type=int, nargs="*", default=[])
    parser.add_argument(
        "--fault-injector-fault-types", default="sigkill", help="with commas, one for each cycle"
    )
    parser.add_argument("--fault-injector-delay-start-iteration", type=int, default=0)
    parser.add_argument("--fault-injector-fault-delay", type=float, default=0.0, help="seconds")
    options = parser.parse_args()
    if options.non_persistent_ckpt_type and not options.non_persistent_local_ckpt_dir:
        parser.error("--non-persistent-ckpt-type local needs --non-persistent-local-ckpt-dir")
    options.fault_injector_fault_types = options.fault_injector_fault_types.upper().split(",")
    if not set(options.fault_injector_fault_types) <= set(Fault.__members__):
        parser.error(f"--fault-injector-fault-types: choose from {', '.join(Fault.__members__)}")
    return options


class Monitoring:
    """Sections for the rank monitor (nvrx-ft); nothing without `--enable-ft-package`."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Open one session, which lasts over restarts in the process."""
        self.client = RankMonitorClient() if options.enable_ft_package else None
        self.learns = options.calc_ft_timeouts
        self.path = options.save / "ft_state.json"
        if self.client:
            self.client.init_workload_monitoring(num_warmup_iters=options.ft_num_warmup_iters)
            if self.path.exists():
                self.client.load_state_dict(json.loads(self.path.read_text()))

    def section(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the timeout of a section applies."""
        return self.client.section(name) if self.client else contextlib.nullcontext()

    def learn(self) -> None:
        """Replace the timeouts by what this run needed; all ranks call it."""
        if self.client and self.learns:
            self.client.calculate_and_set_section_timeouts(
                selected_sections=["step"], calc_out_of_section=False, skip_if_not_ready=True
            )
            if dist.get_rank() == 0:
                self.path.write_text(json.dumps(dict(self.client.state_dict())))

    def close(self) -> None:
        """End the session."""
        if self.client:
            self.client.shutdown_workload_monitoring()


class Checkpoints:
    """Global checkpoints, and local ones between them (nvrx-ckpt)."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Start nothing: the queue's worker starts with the first save."""
        self.options = options
        self.queue = AsyncCallsQueue(persistent=options.use_persistent_ckpt_worker)
        self.cache = CheckpointMetadataCache()
        self.local: LocalCheckpointManager | None = None

    def open(self) -> None:
        """Meet the other ranks' local checkpoints; the process group exists."""
        options = self.options
        if options.non_persistent_ckpt_type == "local":
            strategy = None
            if options.replication:
                strategy = CliqueReplicationStrategy.from_replication_params(
                    options.replication_jump, options.replication_factor
                )
            self.local = LocalCheckpointManager(
                str(options.non_persistent_local_ckpt_dir), repl_strategy=strategy
            )

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        """Save if it is time to; training may go on when this returns."""
        options = self.options
        if iteration % options.save_interval == 0:
            self._save_global(iteration, state)
        elif self.local and iteration % options.non_persistent_save_interval == 0:
            wrapped = BasicTensorAwareStateDict(state)
            self.queue.schedule_async_request(self.local.save(wrapped, iteration, is_async=True))
        self.queue.maybe_finalize_async_calls(blocking=not options.async_save)

    def _save_global(self, iteration: int, state: dict[str, Any]) -> None:
        folder = self.options.save / f"iter_{iteration:07d}"
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of a save that a fault has cut short
        dist.barrier()
        writer = FileSystemWriterAsync(folder)
        planned = save_state_dict_async_plan(
            state, writer, None, 0, enable_cache=True, metadata_cache=self.cache
        )
        function, preload, arguments = writer.get_save_function_and_args()
        finalize = functools.partial(save_state_dict_async_finalize, *planned)
        request = AsyncRequest(function, arguments, [finalize], preload_fn=preload)
        if dist.get_rank() == 0:
            latest = str(self.options.save / "latest")
            request.add_finalize_fn(functools.partial(publish_latest, latest, folder.name))
        self.queue.schedule_async_request(request)

    def load(self, state: dict[str, Any]) -> str:
        """Fill the state from the newest checkpoint, local or global; return which."""
        newest = read_latest(str(self.options.save / "latest"))
        global_iteration = int(newest.removeprefix("iter_")) if newest else -1
        if self.local and self.local.find_latest() > global_iteration:
            loaded, _ = self.local.load()
            state.update(loaded.state_dict)
            return "local"
        if newest:
            dcp.load(state, checkpoint_id=self.options.save / newest)
            return "global"
        return "no"

    def abort(self) -> None:
        """Give up saves that are under way; the next save starts a new worker."""
        self.queue.close(abort=True)
        self.local = None


class AbortCheckpoints(inprocess.abort.Abort):
    """Abort saves before process groups are aborted."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        """Abort."""
        self.checkpoints.abort()
        return state


def restarting(options: argparse.Namespace, checkpoints: Checkpoints) -> inprocess.Wrapper:
    """Return the wrapper for restarts in the process (nvrx-inprocess), as Megatron-LM makes it."""
    active = options.inprocess_active_world_size
    restarter = inprocess.nested_restarter
    layer = inprocess.rank_assignment.Layer(
        min_ranks=active, max_ranks=active, flag=inprocess.rank_assignment.LayerFlag.RESERVE
    )
    return inprocess.Wrapper(
        store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 2},
        initialize=inprocess.Compose(
            inprocess.initialize.RetryController(min_world_size=active),
            restarter.NestedRestarterHandlingCompleted(),
        ),
        abort=inprocess.Compose(
            inprocess.abort.AbortTorchDistributed(),
            AbortCheckpoints(checkpoints),
            restarter.NestedRestarterHandlingStarting(),
        ),
        completion=restarter.NestedRestarterFinalized(),
        terminate=restarter.NestedRestarterAborted(),
        rank_assignment=inprocess.rank_assignment.Tree([layer]),
        soft_timeout=timedelta(seconds=options.inprocess_soft_timeout),
        hard_timeout=timedelta(seconds=options.inprocess_hard_timeout),
        last_call_wait=timedelta(seconds=options.inprocess_last_call_wait),
    )


class Trainer:
    """Model and optimizer of one rank."""

    def __init__(self) -> None:
        """Build the model; weights are the same on all ranks."""
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.iteration = 0

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint holds."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "iteration": self.iteration}

    def resume(self, state: dict[str, Any]) -> None:
        """Take over a loaded state."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.iteration = state["iteration"]

    def train_step(self) -> float:
        """Train on a batch that depends on iteration and rank alone; return the loss."""
        generator = torch.Generator().manual_seed(1000 * self.iteration + dist.get_rank())
        inputs = torch.randn(32, 16, generator=generator)
        loss = nn.functional.mse_loss(self.parallel(inputs), inputs.sin().sum(1, keepdim=True))
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.iteration += 1
        return loss.item()

    def digest(self) -> str:
        """Return a hash of the weights."""
        values = [value.numpy().tobytes() for value in self.model.state_dict().values()]
        return hashlib.sha256(b"".join(values)).hexdigest()


def fail(options: argparse.Namespace) -> None:
    """Have the fault of this cycle, and wait until it has come."""
    fault = Fault[options.fault_injector_fault_types[CYCLE]]
    dispatch_fault_injection(fault=fault, delay=options.fault_injector_fault_delay, callback=None)
    workload_raise_event.wait(FAULT_DEADLINE_S)
    maybe_raise_workload_exception()


def show(report: straggler.Report | None) -> None:
    """Print a report of slow ranks (nvrx-straggler), if this rank has one."""
    if report:
        print(report.table(), flush=True)


def pretrain(
    options: argparse.Namespace,
    monitoring: Monitoring,
    checkpoints: Checkpoints,
    inprocess_call_wrapper: Any = None,
) -> None:
    """Train from the newest checkpoint to the last iteration."""
    call = inprocess_call_wrapper  # filled in by its name, if restarts in the process are on
    attempt = call.iteration if call else 0
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with monitoring.section("setup"):
        # The wrapper's store outlives each attempt, so each has a prefix of its own.
        store = dist.PrefixStore(f"pretrain/{attempt}", call.store) if call else None
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        checkpoints.open()
        trainer = Trainer()
        state = trainer.state()
        source = checkpoints.load(state)
        trainer.resume(state)
        if options.log_straggler:
            straggler.Detector.shutdown()  # of the attempt before
            straggler.Detector.initialize(report_time_interval=60, cuda_profiling="off")
            straggler.Detector.wrap_callables([straggler.CallableId(trainer, "train_step")])
    print(f"rank {rank} starts at {trainer.iteration} from {source} checkpoint", flush=True)
    has_fault = attempt == 0 and CYCLE in range(len(options.fault_injector_fault_types))
    while trainer.iteration < options.train_iters:
        is_due = trainer.iteration == options.fault_injector_delay_start_iteration
        with monitoring.section("step"):
            if rank in options.fault_injector_ranks and is_due and has_fault:
                fail(options)
            loss = trainer.train_step()
        if rank == 0:
            done = f"iteration {trainer.iteration:8d}/{options.train_iters:8d}"
            print(f" {done} | lm loss: {loss:.6E} |", flush=True)
        with monitoring.section("checkpointing"):
            checkpoints.save(trainer.iteration, trainer.state())
        if options.log_straggler:
            show(straggler.Detector.generate_report_if_interval_elapsed())
    checkpoints.queue.maybe_finalize_async_calls(blocking=True)
    monitoring.learn()
    if options.log_straggler:
        show(straggler.Detector.generate_report())
        straggler.Detector.shutdown()
    if rank == 0:
        result = {"iteration": trainer.iteration, "loss": loss, "weights": trainer.digest()}
        print(f"result: {json.dumps(result)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run one rank."""
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    options.save.mkdir(parents=True, exist_ok=True)
    monitoring, checkpoints = Monitoring(options), Checkpoints(options)
    train = restarting(options, checkpoints)(pretrain) if options.inprocess_restart else pretrain
    train(options, monitoring, checkpoints)
    checkpoints.queue.close()
    monitoring.close()


if __name__ == "__main__":
    main()
