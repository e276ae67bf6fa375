# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of tensors on a real GPU: pinned staging, isolation, and where tensors return to."""

import io

import pytest
import torch
from dcp_saves import assert_same, assert_whole, load_like, request_for
from results import no_second_try

from nvidia_resiliency_ext.checkpointing._staging import StagingBuffer
from nvidia_resiliency_ext.checkpointing.async_ckpt import TorchAsyncCheckpoint
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

ELEMENTS = 1 << 22


def cuda_state(value):
    """Return a state on the device: large, small, of other layouts, and some on the CPU."""
    whole = torch.full((ELEMENTS,), float(value), device="cuda")
    return {
        "large": whole,
        "view": torch.full((300, 70), float(value), device="cuda").t()[1],
        "half": torch.full((7, 9), value, dtype=torch.bfloat16, device="cuda"),
        "scalar": torch.tensor(float(value), device="cuda"),
        "host": torch.full((ELEMENTS,), float(value)),
        "step": value,
    }


def on_host(state):
    return {k: v.cpu() if torch.is_tensor(v) else v for k, v in state.items()}


@pytest.fixture
def queue():
    made = AsyncCallsQueue()
    yield made
    made.close(abort=True)


def test_staging_memory_is_pinned_for_cuda_tensors():
    """The buffer is registered with CUDA, and given back when it is closed."""
    buffer = StagingBuffer(1 << 20, pinned=True)
    assert buffer.tensor().is_pinned()
    address = buffer.tensor().data_ptr()
    buffer.close()
    assert int(torch.cuda.cudart().cudaHostUnregister(address)) != 0


@pytest.mark.no_second_try
def test_changes_on_the_device_never_reach_the_file(queue, tmp_path):
    """What kernels write after scheduling is not in the checkpoint, also from another stream."""
    side = torch.cuda.Stream()
    for step in range(4):
        state = cuda_state(step)
        queue.schedule_async_request(request_for(state, tmp_path / str(step)))
        with torch.cuda.stream(side):
            for value in state.values():
                if torch.is_tensor(value):
                    value.fill_(99)
        side.synchronize()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2, 3]
    for step in range(4):
        wanted = on_host(cuda_state(step))
        assert_same(wanted, load_like(wanted, tmp_path / str(step)))
        assert_whole(tmp_path / str(step))


@pytest.mark.no_second_try
def test_work_that_is_queued_on_the_stream_is_saved(queue, tmp_path):
    """A save waits for what the current stream still has to write into the tensors."""
    matrix = torch.rand(4096, 4096, device="cuda")
    product = matrix
    for _ in range(30):
        product = (product @ matrix).softmax(0)
    queue.schedule_async_request(request_for({"product": product}, tmp_path))
    queue.maybe_finalize_async_calls(blocking=True)
    assert_same({"product": product.cpu()}, load_like({"product": product.cpu()}, tmp_path))


def test_device_memory_that_is_used_again_is_never_stale(queue, tmp_path):
    """Tensors freed, moved to the host and back, or made anew between saves are saved right."""
    state = {f"layer{i}": torch.zeros(ELEMENTS // 4, device="cuda") for i in range(4)}
    for step in range(8):
        for number, name in enumerate(state):
            if (step + number) % 3 == 0:
                state[name] = state[name].cpu().cuda()
            elif (step + number) % 3 == 1:
                state[name] = None
                torch.cuda.empty_cache()
                state[name] = torch.empty(ELEMENTS // 4, device="cuda")
            state[name].fill_(step * 10 + number)
        wanted = on_host(state)
        queue.schedule_async_request(request_for(state, tmp_path / str(step)))
        queue.maybe_finalize_async_calls(blocking=True)
        assert_same(wanted, load_like(wanted, tmp_path / str(step)))


def test_worker_has_no_cuda_context(queue, tmp_path):
    """The process that writes does not even load CUDA."""
    queue.schedule_async_request(request_for(cuda_state(1), tmp_path))
    queue.maybe_finalize_async_calls(blocking=True)
    with open(f"/proc/{queue.persistent_caller.process.pid}/maps") as maps:
        assert not [line for line in maps if "libcuda" in line or "libtorch" in line]


def test_functions_get_values_of_cuda_tensors(queue, tmp_path):
    """A user's function gets the values as they were; it needs no handle of the device."""
    tensor = torch.full((5,), 3.0, device="cuda")
    queue.schedule_async_request(AsyncRequest(torch.save, (tensor, str(tmp_path / "t.pt")), []))
    tensor.fill_(9)
    queue.maybe_finalize_async_calls(blocking=True)
    assert torch.load(tmp_path / "t.pt", map_location="cpu").tolist() == [3.0] * 5


def test_file_of_torch_save_loads_as_it_was(tmp_path):
    """The file holds what torch.save would have written of the state at the time of the call."""
    checkpoint = TorchAsyncCheckpoint()
    state = cuda_state(4)
    expected = io.BytesIO()
    torch.save(state, expected)
    checkpoint.async_save(state, tmp_path / "model.pt")
    state["large"].zero_()
    checkpoint.finalize_async_save(blocking=True)
    checkpoint.close()
    found = torch.load(tmp_path / "model.pt", map_location="cpu")
    expected.seek(0)
    assert_same(torch.load(expected, map_location="cpu"), found)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_local_checkpoints_return_to_the_device(queue, asynchronous, tmp_path):
    """Each tensor is on the kind of device that it came from, bit for bit."""
    manager = LocalCheckpointManager(tmp_path)
    request = manager.save(BasicTensorAwareStateDict(cuda_state(6)), 1, is_async=asynchronous)
    if request is not None:
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    manager = LocalCheckpointManager(tmp_path)
    with no_second_try():
        assert manager.find_latest() == 1
        found = manager.load()[0].state_dict
        torch.cuda.synchronize()
        wanted = cuda_state(6)
        for name, value in wanted.items():
            if torch.is_tensor(value):
                assert found[name].device.type == value.device.type
                assert torch.equal(found[name], value)
