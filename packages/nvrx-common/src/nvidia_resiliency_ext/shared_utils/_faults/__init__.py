# SPDX-License-Identifier: Apache-2.0
"""Modules behind `shared_utils.inject_fault`; nothing here is public."""
