# SPDX-License-Identifier: Apache-2.0
"""The older import path of ``nvidia_resiliency_ext.attribution.straggler``; it adds nothing."""

__all__: list[str] = []
