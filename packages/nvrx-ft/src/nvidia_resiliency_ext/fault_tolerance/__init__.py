# SPDX-License-Identifier: Apache-2.0
"""Fault-tolerant launcher and rank monitor for PyTorch jobs."""
