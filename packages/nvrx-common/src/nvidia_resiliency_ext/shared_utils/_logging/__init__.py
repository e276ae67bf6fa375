# SPDX-License-Identifier: Apache-2.0
"""Private room of ``shared_utils.log_manager``: settings, formatters, handlers."""
