# SPDX-License-Identifier: Apache-2.0
"""Managers that save, find and load local checkpoints on all ranks together."""
