# SPDX-License-Identifier: Apache-2.0
"""Older names of tools that live elsewhere."""
