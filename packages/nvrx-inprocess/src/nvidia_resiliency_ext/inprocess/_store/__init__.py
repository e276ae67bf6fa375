# SPDX-License-Identifier: Apache-2.0
"""Stores: access with typed errors, barriers, the process that hosts one, and where it is."""
