# SPDX-License-Identifier: Apache-2.0
"""One of two gloo ranks of a Lightning training with a monitor; prints how `fit` has ended.

Arguments: the case, the folder of the run, that of the monitors' sockets.
"""

import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_jobs import SmallModule

from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback


def main() -> None:
    case, folder, sockets = sys.argv[1], *map(Path, sys.argv[2:])
    rank = os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = str(sockets / f"rank{rank}.sock")
    torch.set_num_threads(1)
    callback = FaultToleranceCallback(autoresume=False, calculate_timeouts=True)

    def at_step(step):
        if case == "unwatched" and step == 6 and rank == "1":
            Path(folder, "kill").touch()
            while callback.fault_tol_client._words is not None:  # until the loss is noticed
                time.sleep(0.01)

    def fit(steps, path=None):
        saver = ModelCheckpoint(folder / "ckpt", every_n_train_steps=2, save_top_k=-1)
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            logger=False,
            default_root_dir=os.fspath(folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[saver, callback],
            max_steps=steps,
            limit_val_batches=0,
        )
        trainer.fit(SmallModule(at_step), ckpt_path=path)
        return trainer.global_step, saver.best_model_path

    try:
        _, path = fit(2)
        steps, _ = fit(8, path)
    except (OSError, RuntimeError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(0)  # as a rank that fails does; the other one must not wait for it
    torch.distributed.destroy_process_group()  # else its threads may abort the process at its end
    sys.stdout.write(f"{steps} steps")


if __name__ == "__main__":
    main()
