# SPDX-License-Identifier: Apache-2.0
"""Private room of ``shared_utils.log_aggregator``: many files of a node's processes become one."""
