# SPDX-License-Identifier: Apache-2.0
"""Services around the analysis of failures."""

__all__: list[str] = []
