# SPDX-License-Identifier: Apache-2.0
"""The monitor: one process per node that watches ranks and speaks for them."""
