# SPDX-License-Identifier: Apache-2.0
"""Types and decisions around an analysis: settings, jobs, paths, requests and replies."""

__all__: list[str] = []
