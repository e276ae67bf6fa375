# SPDX-License-Identifier: Apache-2.0
"""Services around the analysis of failures; this version has no names yet."""

__all__: list[str] = []
