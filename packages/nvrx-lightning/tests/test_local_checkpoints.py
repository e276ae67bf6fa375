# SPDX-License-Identifier: Apache-2.0
"""Local checkpoints of real Lightning trainings, through the real local checkpoint manager."""

from datetime import timedelta

import pytest
import torch
from results import no_second_try

pytest.importorskip("nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager")

from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning_jobs import SmallModule, trainer

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
    BasicTensorAwareStateDict,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.ptl_resiliency.local_checkpoint_callback import (
    HierarchicalCheckpointIO,
    LocalCheckpointCallback,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


class TensorIO(HierarchicalCheckpointIO):
    """Keeps the trainer's checkpoint as it is; `**kwargs` are options of its own."""

    def to_tensor_aware_state_dict(self, checkpoint):
        return BasicTensorAwareStateDict(checkpoint)

    def from_tensor_aware_state_dict(self, tensor_aware_checkpoint, **kwargs):
        assert not kwargs, kwargs
        return tensor_aware_checkpoint.state_dict


def weights(module):
    """Return a copy of the weights."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_newer_local_checkpoint_is_restored(tmp_path, one_rank):
    """A run continues at the step of the local checkpoint when that is newer, with its weights."""
    manager = LocalCheckpointManager(tmp_path / "local")
    callback = LocalCheckpointCallback(every_n_train_steps=5)
    io = TensorIO(TorchCheckpointIO(), manager, lambda _path: 4)
    module = SmallModule()
    job = trainer(tmp_path, [callback], max_steps=5, plugins=[io], limit_val_batches=0)
    job.fit(module)
    assert manager.find_latest() == 5
    saved = weights(module)
    older = tmp_path / "ckpt" / "epoch=0-step=4.ckpt"
    assert older.exists()

    fresh = TensorIO(TorchCheckpointIO(), LocalCheckpointManager(tmp_path / "local"), lambda _: 4)
    first = {}
    again = SmallModule(lambda step: first or first.update(step=step, weights=weights(again)))
    job = trainer(tmp_path, [], max_steps=6, plugins=[fresh], limit_val_batches=0)
    job.fit(again, ckpt_path=older)
    with no_second_try():
        assert first["step"] == 5
        for name, value in saved.items():
            assert torch.equal(first["weights"][name], value)


def test_an_older_local_checkpoint_is_not(tmp_path, one_rank):
    """A run continues at the ordinary checkpoint when the local one is older."""
    manager = LocalCheckpointManager(tmp_path / "local")
    io = TensorIO(TorchCheckpointIO(), manager, lambda _path: 4)
    callback = LocalCheckpointCallback(every_n_train_steps=3)
    trainer(tmp_path, [callback], max_steps=4, plugins=[io], limit_val_batches=0).fit(SmallModule())
    assert manager.find_latest() == 3
    steps = []
    job = trainer(tmp_path, [], max_steps=6, plugins=[TensorIO(TorchCheckpointIO(), manager,
                  lambda _: 4)], limit_val_batches=0)  # fmt: skip
    job.fit(SmallModule(steps.append), ckpt_path=tmp_path / "ckpt" / "epoch=0-step=4.ckpt")
    assert steps == [4, 5]


def test_when_local_checkpoints_are_saved(tmp_path, one_rank):
    """They are saved at training batches, by steps or by time, and not at the end of an epoch."""
    saved = []

    class Manager:
        def save(self, _state, iteration, is_async):
            saved.append((iteration, is_async))

        def find_latest(self):
            return -1

    def run(**options):
        saved.clear()
        io = TensorIO(TorchCheckpointIO(), Manager(), lambda _path: 0, async_save=True)
        callback = LocalCheckpointCallback(**options, async_save=True)
        trainer(tmp_path, [callback], max_epochs=1, max_steps=-1, limit_train_batches=7,
                accumulate_grad_batches=2, plugins=[io]).fit(SmallModule())  # fmt: skip
        return list(saved)

    assert run(every_n_train_steps=2) == [(2, True), (4, True)]
    assert run(train_time_interval=timedelta(0)) == [(step, True) for step in (1, 2, 3, 4)]
    assert run(train_time_interval=timedelta(days=1)) == []
    with pytest.raises(ValueError, match="every_n_train_steps"):
        LocalCheckpointCallback()


def test_what_is_local_has_no_path():
    """A local save with a path is refused, and an ordinary one goes to the wrapped I/O."""
    calls = []

    class Wrapped(TorchCheckpointIO):
        def save_checkpoint(self, _checkpoint, path, storage_options=None):
            calls.append((path, storage_options))

        def load_checkpoint(self, path, _map_location=None, weights_only=None):
            return (path, weights_only)

    class Nothing:
        def find_latest(self):
            return -1

    io = TensorIO(AsyncCheckpointIO(Wrapped()).checkpoint_io, Nothing(), lambda _path: 0)
    with pytest.raises(ValueError, match="no path"):
        io.save_checkpoint({}, "x", {"local_checkpoint_options": {"iteration": 1}})
    io.save_checkpoint({}, "y", {"other": 1})
    assert calls == [("y", {"other": 1})]
    assert io.load_checkpoint("z", weights_only=False) == ("z", False)
