# SPDX-License-Identifier: Apache-2.0
"""Logs that are read while they grow, and what is kept of a job's attempts."""
