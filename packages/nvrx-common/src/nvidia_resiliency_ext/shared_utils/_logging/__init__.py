# SPDX-License-Identifier: Apache-2.0
"""Private modules of ``shared_utils.log_manager``: settings, formatters, handlers."""
