# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM, Megatron-Bridge, NeMo and attribution tools import and call, as they write it.

Each row is a short program that must run without an error. `needs` names the distribution that
brings the names; the rows of one distribution share an interpreter, each in a namespace of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "Row"]

MEGATRON = "Megatron-LM"
BRIDGE = "Megatron-Bridge"
NEMO = "NeMo"
TOOLS = "attribution clients and tools"


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
    Row(
        BRIDGE,
        "megatron/bridge/training/checkpointing.py: an abort, and the default queue",
        "nvrx-ckpt",
        """
import os, tempfile, torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
done = []
request = AsyncRequest(os.getpid, (), [lambda: done.append(1)])
request.freeze().execute_sync()
assert done == [1]
queue = AsyncCallsQueue(persistent=False)
manager = LocalCheckpointManager(tempfile.mkdtemp())
queue.schedule_async_request(
    manager.save(BasicTensorAwareStateDict({"weight": torch.ones(3)}), 3, is_async=True))
assert queue.get_num_unfinalized_calls() == 1
queue.maybe_finalize_async_calls(blocking=True)
assert manager.find_latest() == 3
assert manager._filename_to_id(os.path.basename(manager._filename_from_template(3, 0)))
queue.schedule_async_request(AsyncRequest(os.getpid, (), []))
queue.close(abort=True)
assert queue.get_num_unfinalized_calls() == 0
assert queue.schedule_async_request(AsyncRequest(os.getpid, (), [])) == 0
queue.close()
torch.distributed.destroy_process_group()
""",
    ),
    Row(
        f"{MEGATRON}, {BRIDGE}",
        "megatron/training/inprocess_restart.py: what its own callbacks use",
        "nvrx-inprocess",
        """
from datetime import timedelta
import nvidia_resiliency_ext.inprocess as inprocess
for name in ("iteration", "state", "store", "base_store", "atomic", "ping", "shutdown",
             "disable_hang_protection"):
    assert hasattr(inprocess.CallWrapper, name), name
state = inprocess.state.State(rank=0, world_size=1, initial_rank=0, initial_world_size=1)
state.active_world_size = state.active_rank = 0
try:
    inprocess.initialize.RetryController(min_world_size=2)(state)
except inprocess.exception.RestartAbort as error:
    assert "iteration=" in str(error)
else:
    raise AssertionError("too few ranks are enough")
inprocess.abort.AbortTorchDistributed(torch_fr_trace_path=None)
inprocess.finalize.ThreadedFinalize(timedelta(seconds=10), print, args=(), kwargs={})
""",
    ),
    Row(
        f"{MEGATRON}, {BRIDGE}",
        "megatron/training/ft_integration.py: all calls of a training, without a monitor",
        "nvrx-ft",
        """
import inspect
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
assert list(inspect.signature(RankMonitorClient.init_workload_monitoring).parameters) == [
    "self", "num_warmup_iters"]
for name in (
    "start_section", "end_section", "end_all_sections", "send_heartbeat", "state_dict",
    "load_state_dict", "calculate_and_set_hb_timeouts", "send_workload_control_request",
):
    assert callable(getattr(RankMonitorClient, name)), name
""",
    ),
    Row(
        NEMO,
        "nemo/lightning/run/plugins.py: sections, and reports of slow GPUs",
        "nvrx-lightning",
        """
from nvidia_resiliency_ext.ptl_resiliency import (
    FaultToleranceSectionsCallback, StragglerDetectionCallback,
)
FaultToleranceSectionsCallback(autoresume=False, calculate_timeouts=True)
StragglerDetectionCallback(
    report_time_interval=300, calc_relative_gpu_perf=True, calc_individual_gpu_perf=True,
    num_gpu_perf_scores_to_print=5, gpu_relative_perf_threshold=0.7,
    gpu_individual_perf_threshold=0.7, stop_if_detected=False, enable_ptl_logging=True)
""",
    ),
    Row(
        TOOLS,
        "attribution.base: an analysis of three steps",
        "nvrx-attribution",
        """
from nvidia_resiliency_ext.attribution.base import AttributionState, NVRxAttribution
def read() -> str:
    return "text"
async def evaluate(text: str) -> list[str]:
    return [text, "bad"]
def put_out(found: list[str]) -> tuple[str, AttributionState]:
    return " ".join(found), AttributionState.STOP
analysis = NVRxAttribution(preprocess_input=read, attribution=evaluate, output_handler=put_out)
assert analysis.run_sync({}) == ("text bad", AttributionState.STOP)
def misfit(number: int) -> list[str]:
    return []
try:
    NVRxAttribution(preprocess_input=read, attribution=misfit, output_handler=put_out)
except ValueError:
    pass
else:
    raise AssertionError("steps that do not fit together are taken")
""",
    ),
    Row(
        TOOLS,
        "attribution: all names of the package",
        "nvrx-attribution",
        """
from nvidia_resiliency_ext.attribution import (
    AnalysisPipelineMode, Analyzer, AttrSvcResult, AttributionAnalysisConfig,
    AttributionCacheConfig, AttributionController, AttributionControllerConfig,
    AttributionCredentialsConfig, AttributionPostprocessingConfig, AttributionRecommendation,
    CacheResult, CoalescerStats, CombinedAnalysisResult, DEFAULT_COMPUTE_TIMEOUT_SECONDS,
    ErrorCode, FileInfo, FrDumpPathNotFoundError, InflightResult, Job, JobMode,
    LogAnalysisCoalesced, LogAnalysisCycleResult, LogAnalysisSplitlogResult, LogAnalyzerConfig,
    LogAnalyzerError, LogAnalyzerFilePreview, LogAnalyzerOutcome, LogAnalyzerSubmitResult,
    MAX_JOBS, MIN_FILE_SIZE_KB, POLL_INTERVAL_SECONDS, RESP_MODE, RESP_RESULT, RESP_STATUS,
    RawAnalysisResultItem, RequestCoalescer, STATE_TIMEOUT, SplitlogTracker, StatsResult,
    SubmittedResult, TTL_MAX_JOB_AGE_SECONDS, TTL_PENDING_SECONDS, TTL_TERMINATED_SECONDS,
    TraceAnalyzer, coalesced_from_cache, parse_attrsvc_response, recommendation_should_stop,
    run_attribution_pipeline,
)
assert (MAX_JOBS, MIN_FILE_SIZE_KB, POLL_INTERVAL_SECONDS) == (100000, 4, 300)
assert (TTL_PENDING_SECONDS, TTL_TERMINATED_SECONDS) == (604800, 3600)
assert recommendation_should_stop({"action": "STOP"})
assert not recommendation_should_stop({"action": "RESTART"})
odd = parse_attrsvc_response(["nothing", 7], log_path="/x.log")
assert odd.should_stop is False and odd.log_path == "/x.log"
odd.attribution_preview(max_chars=200), odd.result_id_preview(16), odd.format_log_message()
""",
    ),
    Row(
        TOOLS,
        "attribution.Analyzer and run_attribution_pipeline: a log is analysed",
        "nvrx-attribution",
        """
import asyncio, pathlib, tempfile
from nvidia_resiliency_ext.attribution import (
    AnalysisPipelineMode, Analyzer, FrDumpPathNotFoundError, run_attribution_pipeline,
)
root = tempfile.mkdtemp()
log = pathlib.Path(root, "job_cycle0.log")
log.write_text("[rank3]: torch.OutOfMemoryError: CUDA out of memory." + chr(10))
async def main():
    analyzer = Analyzer(allowed_root=root)
    await analyzer.submit(str(log), user="u", job_id="7", analysis_intent="terminal")
    answer = await analyzer.analyze(str(log), wait=True)
    assert analyzer.read_file_preview(str(log)).content.startswith("[rank3]")
    assert analyzer.get_all_jobs()
    await analyzer.shutdown_async()
    combined = await run_attribution_pipeline(str(log), mode=AnalysisPipelineMode.LOG_ONLY)
    assert combined.log_result
    try:
        await run_attribution_pipeline(str(log), mode=AnalysisPipelineMode.TRACE_ONLY)
    except FrDumpPathNotFoundError:
        return answer
    raise AssertionError("no dump is no error")
assert asyncio.run(main()).recommendation["action"] == "STOP"
""",
    ),
    Row(
        TOOLS,
        "attribution.trace_analyzer: flight recorder dumps",
        "nvrx-attribution",
        """
import asyncio, json, pathlib, tempfile
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_attribution import (
    Collective, CollectiveAnalyzer, eprint,
)
from nvidia_resiliency_ext.attribution.trace_analyzer.fr_support import (
    FR_DUMP_PATH_ENV, FRAnalysisResult, analyze_fr_dump, extract_fr_dump_path,
    fr_fields_for_dataflow_record, fr_markdown_appendix, fr_path_resolvable_for_collective_analyzer,
)
from nvidia_resiliency_ext.attribution.trace_analyzer.trace_collector import (
    TorchFRTraceCollector, TraceCollector,
)
assert FR_DUMP_PATH_ENV == "TORCH_FR_DUMP_TEMP_FILE"
assert issubclass(TorchFRTraceCollector, TraceCollector)
folder = pathlib.Path(tempfile.mkdtemp())
for rank in (0, 1):
    entry = {
        "record_id": 1, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 5,
        "p2p_seq_id": 0, "op_id": 5, "profiling_name": "nccl:all_reduce", "state": "scheduled",
        "time_created_ns": 1, "input_sizes": [[4]], "output_sizes": [[4]],
        "input_dtypes": ["Float"], "output_dtypes": ["Float"], "is_p2p": False, "frames": [],
    }
    last = 5 if rank == 0 else 4
    dump = {
        "version": "2.9",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": {"last_enqueued_collective": last, "last_started_collective": 4,
                            "last_completed_collective": 4}},
        "entries": [entry] if rank == 0 else [],
    }
    (folder / f"_dump_{rank}.json").write_text(json.dumps(dump))
assert fr_path_resolvable_for_collective_analyzer(str(folder))
result = asyncio.run(analyze_fr_dump(str(folder)))
assert isinstance(result, FRAnalysisResult) and "[1]" in result.hanging_ranks, result
assert fr_fields_for_dataflow_record(str(folder), result)["l_hanging_ranks"] == [1]
analyzer = CollectiveAnalyzer(
    {"fr_path": str(folder), "pattern": "_dump_*", "verbose": False, "health_check": False,
     "llm_analyze": False, "model": None, "threshold": 0})
assert "Missing Ranks" in asyncio.run(analyzer.preprocess_FR_dumps())
nobody = "hanging ranks: []"
assert fr_markdown_appendix(dump_path="x", analysis_text="", hanging_ranks=nobody) == ""
""",
    ),
    Row(
        TOOLS,
        "attribution.orchestration: the wire and the texts of old logs",
        "nvrx-attribution",
        """
from nvidia_resiliency_ext.attribution.orchestration import (
    client_response, config, http_api, job, llm_output, log_path_metadata, progressive,
    slurm_parser, types, utils,
)
assert http_api.ROUTE_LOGS == "/logs" and http_api.ROUTE_HEALTHZ == "/healthz"
assert progressive.normalize_analysis_intent("terminal") == progressive.ANALYSIS_INTENT_TERMINAL
assert types.normalize_recommendation_action("what") == "UNKNOWN"
meta = log_path_metadata.extract_job_metadata("/logs/job_123456_date_26_cycle7.log")
assert (meta.job_id, meta.cycle_id) == ("123456", 7), meta
item = types.RawAnalysisResultItem("a", "b", "c", "d", 0, "STOP")
assert types.RawAnalysisResultItem.from_payload(item.to_payload()) == item
assert llm_output.logsage_recommendation([item]).action == "STOP"
assert config.ErrorCode("not_found").value == "not_found"
assert "llm_model" not in config.LogSageExecutionConfig().llm_runtime_overrides()
assert slurm_parser.parse_slurm_output("").logs_dir in (None, "")
""",
    ),
    Row(
        TOOLS,
        "attribution.log_analyzer: the older analyzer of logs",
        "nvrx-attribution",
        """
import pathlib, tempfile
from nvidia_resiliency_ext.attribution.log_analyzer.nvrx_logsage import (
    NVRxLogAnalyzer, chunk_logs_strict, lines_after,
)
assert lines_after(["a", "b", "c"], "b") == ["c"]
assert chunk_logs_strict(["a", "b"]) == {0: ["a", "b"]}
log = pathlib.Path(tempfile.mkdtemp(), "a.log")
log.write_text("ModuleNotFoundError: No module named 'gone'" + chr(10))
result, state = NVRxLogAnalyzer({"log_path": str(log), "exclude_nvrx_logs": False}).run_sync(
    {"log_path": str(log)})
assert result and state is not None
""",
    ),
    Row(
        TOOLS,
        "attribution.coalescing: one computation for all who wait",
        "nvrx-attribution",
        """
import asyncio
from nvidia_resiliency_ext.attribution.coalescing import RequestCoalescer
calls = []
async def work():
    calls.append(1)
    await asyncio.sleep(0)
    return 7
async def main():
    coalescer = RequestCoalescer(compute_timeout=60)
    answers = await asyncio.gather(*(coalescer.get_or_compute("/none", work) for _ in range(3)))
    await coalescer.close()
    return answers
answers = asyncio.run(main())
assert len(answers) == 3 and calls == [1], (answers, calls)
""",
    ),
    Row(
        TOOLS,
        "services.attrsvc: made and asked in a program",
        "nvrx-attribution",
        """
import tempfile
from fastapi.testclient import TestClient
from nvidia_resiliency_ext.services.attrsvc import Settings, create_app, parse_service_endpoint
assert str(parse_service_endpoint("/run/x")) == "unix:///run/x"
with TestClient(create_app(Settings(allowed_root=tempfile.mkdtemp()))) as client:
    assert client.get("/healthz").status_code == 200
""",
    ),
    Row(
        TOOLS,
        "attribution.mcp_integration: modules by name, and the command of the server",
        "nvrx-attribution",
        """
from nvidia_resiliency_ext.attribution.mcp_integration.mcp_client import (
    MultiServerClient, NVRxMCPClient, create_mcp_client, get_server_command,
    is_mcp_connection_error, run_distributed_attribution,
)
from nvidia_resiliency_ext.attribution.mcp_integration.module_definitions import (
    create_args_from_dict, register_all_modules,
)
from nvidia_resiliency_ext.attribution.mcp_integration.registry import (
    AttributionModuleRegistry, ModuleMetadata, deserialize_result, global_registry,
    serialize_result,
)
register_all_modules()
assert set(global_registry.list_modules()) == {"log_analyzer", "fr_analyzer", "log_fr_analyzer"}
assert isinstance(global_registry.get_module_metadata("fr_analyzer"), ModuleMetadata)
order = global_registry.get_execution_order()
assert order.index("log_fr_analyzer") == 2
args = create_args_from_dict("log_fr_analyzer", {"log_path": "/x", "fr_path": "/y"})
assert args["threshold"] == 0 and args.pattern == "_dump_*"
registry = AttributionModuleRegistry(cache_max_entries=2)
key = registry.cache_result("m", {"a": 1}, {"found": [1]})
assert registry.get_cached_result_by_uri("attribution://m/" + key) == {"found": [1]}
assert deserialize_result(serialize_result({"a": (1, 2)})) == {"a": [1, 2]}
assert get_server_command(log_level="DEBUG")[-2:] == ["--log-level", "DEBUG"]
assert isinstance(create_mcp_client(mcp_server_log_level="INFO"), NVRxMCPClient)
assert is_mcp_connection_error(ConnectionResetError())
""",
    ),
    Row(
        TOOLS,
        "attribution.restart_agent and refine: decisions in JSON, without a model",
        "nvrx-attribution",
        """
import pathlib, tempfile
from nvidia_resiliency_ext.attribution import engine, refine
from nvidia_resiliency_ext.attribution.combined_log_fr.llm_merge import unpack_run_result
from nvidia_resiliency_ext.attribution.restart_agent import (
    RestartAgentRequest, build_restart_agent_runtime, config_fingerprint,
    parse_restart_agent_config,
)
log = pathlib.Path(tempfile.mkdtemp(), "job.log")
log.write_text("ModuleNotFoundError: No module named 'model'\\n")
config = parse_restart_agent_config({"schema_version": "restart_agent_config.v1"}, environ={})
assert config_fingerprint(config).startswith("sha256:")
agent = build_restart_agent_runtime(config)
early = []
reply = agent.analyze(RestartAgentRequest(str(log), "7", 0), on_deterministic_ready=early.append)
agent.attempt_record_control.clear()
agent.close()
assert (reply["decision"], early[0]["decision"]) == ("STOP", "STOP")
assert reply["primary_failure"]["failure_class"] == "user.import_error"
assert refine.model_settings_from_environ({}) is None
assert unpack_run_result(("text", None))[0] == "text"
scanner = engine.LogScanner()
scanner.feed(log.read_bytes())
assert scanner.snapshot().to_dict()["schema"] == "nvrx_attribution.v1"
""",
    ),
]
