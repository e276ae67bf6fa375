# SPDX-License-Identifier: Apache-2.0
"""Rounds of a job with many nodes, decided by one host over a store that all of them reach."""
