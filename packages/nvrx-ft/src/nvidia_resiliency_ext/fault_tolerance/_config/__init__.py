# SPDX-License-Identifier: Apache-2.0
"""The options of fault tolerance: one table, and the dataclass, file and flags made from it."""
