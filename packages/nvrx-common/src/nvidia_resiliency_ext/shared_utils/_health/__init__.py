# SPDX-License-Identifier: Apache-2.0
"""Private rooms of ``shared_utils.health_check``: reading the hardware, and judging it."""
