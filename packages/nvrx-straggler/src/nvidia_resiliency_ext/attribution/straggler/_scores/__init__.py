# SPDX-License-Identifier: Apache-2.0
"""Scores and reports of them; no collectives and no clocks."""
