# SPDX-License-Identifier: Apache-2.0
"""Describe tensors without their data, and find devices by their type."""

from nvidia_resiliency_ext.checkpointing.local._placeholder import (
    TensorPlaceholder,
    get_default_device_from_type,
)

__all__ = ["TensorPlaceholder", "get_default_device_from_type"]
