# SPDX-License-Identifier: Apache-2.0
"""Number ranks and choose the active ones."""
