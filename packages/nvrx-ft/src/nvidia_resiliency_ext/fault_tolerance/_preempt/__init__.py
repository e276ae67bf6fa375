# SPDX-License-Identifier: Apache-2.0
"""Announced preemption on one node: when it begins, and what the ranks are told."""
