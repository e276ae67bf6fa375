# SPDX-License-Identifier: Apache-2.0
"""A training framework's use of sections: what is called, and when, as Megatron-LM does it.

Written for these tests; the functions have the names of Megatron-LM's `ft_integration`, so that
either can be driven by `section_training.py`.
"""

import json
import os

import torch.distributed as dist

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

ENOUGH_STEPS = 16


class Session:
    """The client of this rank and what decides which timeouts may be calculated."""

    def __init__(self, state_path, warmup_steps, *, calculates):
        """Connect, before there is a process group, and open the section `setup`."""
        self.state_path = state_path
        self.warmup_steps = warmup_steps
        self.calculates = calculates
        self.steps = 0
        self.checkpoints = 0
        self.is_setting_up = True
        self.was_checkpoint_loaded = False
        self.client = RankMonitorClient()
        self.client.init_workload_monitoring(num_warmup_iters=warmup_steps)
        if os.path.exists(state_path):
            with open(state_path) as file:
                self.client.load_state_dict(json.load(file))
        self.client.start_section("setup")

    def update(self, *, is_last):
        """Calculate what has been seen often enough and let rank 0 store it."""
        if not self.calculates:
            return
        sections = []
        if self.was_checkpoint_loaded:
            sections.append("setup")
        if self.steps >= ENOUGH_STEPS:
            sections.append("step")
        if self.checkpoints:
            sections.append("checkpointing")
        is_complete = is_last and len(sections) == 3
        if not sections:
            return
        self.client.calculate_and_set_section_timeouts(
            selected_sections=sections, calc_out_of_section=is_complete
        )
        if dist.get_rank() == 0:
            with open(self.state_path, "w") as file:
                json.dump(self.client.state_dict(), file)


session = None


def setup(args):
    """Begin, before the process group exists."""
    global session  # noqa: PLW0603 - one per process, as in the framework
    session = Session(
        os.path.join(args.save, "ft_state.json"),
        args.ft_num_warmup_iters,
        calculates=args.calc_ft_timeouts,
    )


def get_rank_monitor_client():
    """The client, or None after the end."""
    return session and session.client


def on_checkpoint_loaded(is_local_chkpt):
    """A checkpoint was read."""
    session.was_checkpoint_loaded = not is_local_chkpt


def on_training_step_start():
    """A step begins."""
    if session.is_setting_up:
        session.client.end_section("setup")
        session.is_setting_up = False
    if session.steps >= session.warmup_steps:
        session.client.start_section("step")


def on_training_step_end():
    """A step ends."""
    if session.steps >= session.warmup_steps:
        session.client.end_section("step")
    session.steps += 1


def on_checkpointing_start():
    """Saving begins."""
    session.client.start_section("checkpointing")


def on_checkpointing_end(is_async_finalization):
    """Saving ends."""
    session.client.end_section("checkpointing")
    if not is_async_finalization:
        session.checkpoints += 1
        session.update(is_last=False)


def shutdown():
    """Training is done."""
    global session  # noqa: PLW0603 - one per process, as in the framework
    session.update(is_last=True)
    session.client.shutdown_workload_monitoring()
    session = None
