# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM, Megatron-Bridge and NeMo import and call, as they write it.

Each row is a short program that must run without an error. `needs` names the distribution that
brings the names; the rows of one distribution share an interpreter, each in a namespace of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "Row"]

MEGATRON = "Megatron-LM"
BRIDGE = "Megatron-Bridge"
NEMO = "NeMo"


@dataclass(frozen=True)
class Row:
    """One use of the public names.

    Attributes:
        caller: Who writes it.
        where: File of the caller.
        needs: Distribution that brings the names.
        code: What it does, with assertions on what comes back.
    """

    caller: str
    where: str
    needs: str
    code: str


ROWS = [
    Row(
        MEGATRON,
        "megatron/core/dist_checkpointing: version check",
        "nvrx-common",
        """
import nvidia_resiliency_ext
from packaging.version import Version
assert Version(nvidia_resiliency_ext.__version__) >= Version("0.6.0")
""",
    ),
    Row(
        MEGATRON,
        "megatron/core/fault_injector.py",
        "nvrx-common",
        """
from nvidia_resiliency_ext.shared_utils.inject_fault import (
    Fault, clear_workload_exception, dispatch_fault_injection, maybe_raise_workload_exception,
)
assert Fault["SIGKILL"] is Fault(int(float(Fault.SIGKILL.value)))
handle = dispatch_fault_injection(fault=Fault.WORKLOAD_EXC, delay=3600.0, callback=None)
handle.cancel()
maybe_raise_workload_exception()
clear_workload_exception()
""",
    ),
    Row(
        MEGATRON,
        "megatron/training/ft_integration.py",
        "nvrx-ft",
        """
import json, os
from nvidia_resiliency_ext import fault_tolerance
client = fault_tolerance.RankMonitorClient()
assert client.section_timeouts is None
state = json.loads(json.dumps(dict(client.state_dict())))
client.load_state_dict(state)
os.environ.pop("FT_RANK_MONITOR_IPC_SOCKET", None)
try:
    client.init_workload_monitoring(num_warmup_iters=5)
except fault_tolerance.RankMonitorClientError as error:
    assert "ft_launcher" in str(error)
client.shutdown_workload_monitoring()
""",
    ),
    Row(
        BRIDGE,
        "megatron/bridge/training/fault_tolerance.py",
        "nvrx-ft",
        """
import inspect
import nvidia_resiliency_ext.fault_tolerance as ft
client = ft.RankMonitorClient()
client.shutdown_workload_monitoring()  # after a failure: not collective, waits for nobody
parameters = inspect.signature(client.calculate_and_set_section_timeouts).parameters
assert {"selected_sections", "calc_out_of_section"} <= set(parameters)
""",
    ),
    Row(
        NEMO,
        "NeMo-RL: launcher configuration",
        "nvrx-ft",
        """
from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig
cfg = FaultToleranceConfig.from_kwargs(initial_rank_heartbeat_timeout=360)
assert cfg.initial_rank_heartbeat_timeout == 360
""",
    ),
    Row(
        MEGATRON,
        "megatron/training/inprocess_restart.py",
        "nvrx-inprocess",
        """
import importlib, socket
from datetime import timedelta
inprocess = importlib.import_module("nvidia_resiliency_ext.inprocess")
class Done(inprocess.abort.Abort):
    def __call__(self, frozen_state):
        return frozen_state
layers = [
    inprocess.rank_assignment.Layer(
        min_ranks=1, max_ranks=1, flag=inprocess.rank_assignment.LayerFlag.RESERVE),
    inprocess.rank_assignment.Layer(
        min_ranks=1, max_ranks=1, key_or_fn=lambda _: socket.gethostname(),
        flag=inprocess.rank_assignment.LayerFlag.RESERVE),
]
def train(x, call_wrapper: inprocess.CallWrapper = None):
    return x
wrapped = inprocess.Wrapper(
    store_kwargs={"timeout": timedelta(seconds=300), "port": 29502},
    initialize=inprocess.Compose(
        inprocess.initialize.RetryController(max_iterations=None, min_world_size=1),
        inprocess.nested_restarter.NestedRestarterHandlingCompleted()),
    abort=inprocess.Compose(
        inprocess.abort.AbortTransformerEngine(), inprocess.abort.AbortTorchDistributed(),
        Done(), inprocess.nested_restarter.NestedRestarterHandlingStarting()),
    completion=inprocess.nested_restarter.NestedRestarterFinalized(),
    terminate=inprocess.nested_restarter.NestedRestarterAborted(),
    health_check=inprocess.health_check.CudaHealthCheck(timeout=timedelta(seconds=10)),
    rank_assignment=inprocess.rank_assignment.Tree(layers=layers),
    finalize=inprocess.Compose(
        inprocess.finalize.ThreadedFinalize(timeout=timedelta(seconds=10), fn=lambda: None),
        inprocess.finalize.ThreadedFinalize(timeout=timedelta(seconds=10), fn=lambda: None)),
    heartbeat_interval=timedelta(seconds=30), heartbeat_timeout=timedelta(seconds=60),
    barrier_timeout=timedelta(seconds=120), completion_timeout=timedelta(seconds=120),
    monitor_process_interval=timedelta(seconds=1), monitor_thread_interval=timedelta(seconds=1),
    last_call_wait=timedelta(seconds=1), soft_timeout=timedelta(seconds=60),
    hard_timeout=timedelta(seconds=90), termination_grace_time=timedelta(seconds=1),
    enabled=False,
)(train)
assert wrapped(7) == 7
""",
    ),
    Row(
        MEGATRON,
        "megatron/training/inprocess_restart.py: checkpoint workers are stopped at an abort",
        "nvrx-inprocess",
        """
from nvidia_resiliency_ext import inprocess
inprocess.abort.AbortPersistentCheckpointProcesses()
""",
    ),
    Row(
        NEMO,
        "nemo/lightning/run/plugins.py and callbacks",
        "nvrx-lightning",
        """
import inspect
import nvidia_resiliency_ext.ptl_resiliency as res_module
annotation: res_module.StragglerDetectionCallback
callback = res_module.FaultToleranceCallback(
    autoresume=True, calculate_timeouts=True, exp_dir="/tmp")
assert "exp_dir" in inspect.signature(res_module.FaultToleranceCallback).parameters
assert callback.fault_tol_client is None
""",
    ),
    Row(
        NEMO,
        "nemo/lightning/pytorch/local_ckpt.py",
        "nvrx-lightning",
        """
from nvidia_resiliency_ext.ptl_resiliency.local_checkpoint_callback import (
    LOCAL_CKPT_OPTS_KEY, HierarchicalCheckpointIO, LocalCheckpointCallback,
)
assert LOCAL_CKPT_OPTS_KEY == "local_checkpoint_options"
class MCore(HierarchicalCheckpointIO):
    def __init__(self, wrapped, manager, get_iteration):
        super().__init__(wrapped, manager, get_iteration)
    def to_tensor_aware_state_dict(self, checkpoint):
        return checkpoint
    def from_tensor_aware_state_dict(self, tensor_aware_checkpoint, **kwargs):
        return tensor_aware_checkpoint
make = MCore.get_partial_wrapper_constructor(None, lambda path: 0)
assert MCore(None, None, lambda path: 0).async_save is False
LocalCheckpointCallback(every_n_train_steps=10, async_save=True)
""",
    ),
    Row(
        MEGATRON,
        "megatron/core/dist_checkpointing: what is there is found by signatures",
        "nvrx-ckpt",
        """
import inspect
import nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async as filesystem_async
from nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache, save_state_dict_async_finalize, save_state_dict_async_plan,
)
def named(function, parameter):
    return parameter in inspect.signature(function).parameters
assert named(AsyncCallsQueue.__init__, "cpu_shm_mode")
assert named(AsyncCallsQueue.warmup_persistent_caller, "cpu_shm_mode")
assert named(filesystem_async.get_write_results_queue, "mp_mode")
assert named(filesystem_async.FileSystemWriterAsync.__init__, "use_cpu_shm_for_gpu_tensors")
assert hasattr(filesystem_async, "_results_queue")
""",
    ),
    Row(
        MEGATRON,
        "megatron/core/dist_checkpointing/strategies/async_utils.py",
        "nvrx-ckpt",
        """
import tempfile, torch
import torch.distributed.checkpoint as dcp
from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
from nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache, save_state_dict_async_finalize, save_state_dict_async_plan,
)
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=10, io_priority=3, cpu_shm_mode=True)
filesystem_async.get_write_results_queue(mp_mode="fork")
cache = CheckpointMetadataCache()
directory = tempfile.mkdtemp()
state = {"weight": torch.full((4, 4), 1.0), "step": 1}
writer = filesystem_async.FileSystemWriterAsync(
    directory, separation_hint=None, thread_count=2, use_msc=False,
    use_cached_data_structure=False)
planned = save_state_dict_async_plan(
    state, writer, None, 0, planner=dcp.DefaultSavePlanner(), enable_cache=True,
    metadata_cache=cache)
function, preload, arguments = writer.get_save_function_and_args()
ended = []
request = AsyncRequest(
    function, arguments, [lambda: save_state_dict_async_finalize(*planned)],
    async_fn_kwargs={}, preload_fn=preload)
request.add_finalize_fn(lambda: ended.append(1))
assert queue.schedule_async_request(request) == 0
state["weight"].fill_(2.0)
queue.maybe_finalize_async_calls(False, no_dist=False)
queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
queue.close()
assert ended == [1]
loaded = {"weight": torch.zeros(4, 4), "step": 0}
dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(directory))
assert torch.equal(loaded["weight"], torch.full((4, 4), 1.0))
CachedMetadataFileSystemReader.clear_metadata_cache()
filesystem_async.get_write_results_queue()._manager.shutdown()
filesystem_async._results_queue = None
filesystem_async.get_write_results_queue()
torch.distributed.destroy_process_group()
""",
    ),
    Row(
        MEGATRON,
        "megatron/training/checkpointing.py: local checkpoints",
        "nvrx-ckpt",
        """
import tempfile, torch
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    CheckpointingException,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import (
    GroupWrapper, parse_group_sequence,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy, LazyCliqueReplicationStrategy,
)
assert parse_group_sequence(8, 2, 32)[0] == (0, 8)
manager = LocalCheckpointManager(tempfile.mkdtemp())
assert manager.find_latest() == -1
manager.save(BasicTensorAwareStateDict({"weight": torch.ones(3)}), 7, is_async=False)
manager.latest_iteration = -1
assert manager.find_latest() == 7
state, identity = manager.load()
assert tuple(identity) == (7, 0, "")
assert torch.equal(state.state_dict["weight"], torch.ones(3))
""",
    ),
    Row(
        BRIDGE,
        "megatron/bridge: whether checkpointing is installed",
        "nvrx-ckpt",
        """
import nvidia_resiliency_ext.checkpointing
""",
    ),
    Row(
        f"{BRIDGE}, {NEMO}",
        "megatron/bridge/training/straggler.py, nemo callbacks",
        "nvrx-straggler",
        """
import types
import nvidia_resiliency_ext.attribution.straggler as straggler
import nvidia_resiliency_ext.straggler as older
assert older.Detector is straggler.Detector
straggler.Detector.initialize(
    scores_to_compute=["relative_perf_scores", "individual_perf_scores"], gather_on_rank0=True,
    profiling_interval=1, report_time_interval=0.0)
holder = types.SimpleNamespace(train_step=lambda x: x + 1)
straggler.Detector.wrap_callables(
    callable_ids=[straggler.CallableId(holder, "train_step")])
assert holder.train_step(1) == 2
with straggler.Detector.detection_section("step", profile_cuda=False):
    pass
report = straggler.Detector.generate_report_if_interval_elapsed()
assert straggler.Detector.is_interval_elapsed() in {True, False}
report = straggler.Detector.generate_report()
found = report.identify_stragglers(gpu_rel_threshold=0.7, gpu_indiv_threshold=0.7)
assert found["straggler_gpus_relative"] == set() == found["straggler_gpus_individual"]
scores = report.gpu_relative_perf_scores
assert len(list(scores.items())) == len(scores.values()) == len(scores)
assert report.rank_to_node[0]
straggler.reporting.ReportGenerator, straggler.Statistic.MED, straggler.StragglerId(0, "n")
straggler.Detector.shutdown()
""",
    ),
]
