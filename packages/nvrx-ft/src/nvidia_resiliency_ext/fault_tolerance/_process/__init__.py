# SPDX-License-Identifier: Apache-2.0
"""Processes and the interpreter, as `utils` offers them."""
