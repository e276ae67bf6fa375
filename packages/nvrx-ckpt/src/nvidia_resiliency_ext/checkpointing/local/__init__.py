# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of each rank on the disks of its own node, with copies on other nodes."""
