# SPDX-License-Identifier: Apache-2.0
"""Private modules of ``shared_utils.report``: model, text, html."""
