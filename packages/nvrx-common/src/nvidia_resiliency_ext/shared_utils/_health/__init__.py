# SPDX-License-Identifier: Apache-2.0
"""Private modules of ``shared_utils.health_check``: reading the hardware, and evaluating it."""
