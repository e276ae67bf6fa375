# SPDX-License-Identifier: Apache-2.0
"""Asynchronous and local checkpoints; this version has no names yet."""

__all__: list[str] = []
