# SPDX-License-Identifier: Apache-2.0
"""Copies of local checkpoints on other ranks."""
