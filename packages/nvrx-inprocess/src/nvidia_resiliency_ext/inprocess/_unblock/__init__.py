# SPDX-License-Identifier: Apache-2.0
"""End what blocks the main thread: waits, gloo's connections, process groups."""
