# SPDX-License-Identifier: Apache-2.0
"""The Slurm monitor: hands the logs of a cluster's jobs to the attribution service."""

from __future__ import annotations

from nvidia_resiliency_ext.services.smonsvc.models import JobState, MonitoredJob, MonitorState
from nvidia_resiliency_ext.services.smonsvc.monitor import SlurmJobMonitor
from nvidia_resiliency_ext.services.smonsvc.program import main

__all__ = ["JobState", "MonitorState", "MonitoredJob", "SlurmJobMonitor", "main"]
