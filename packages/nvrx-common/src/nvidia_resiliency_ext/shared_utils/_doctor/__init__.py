# SPDX-License-Identifier: Apache-2.0
"""Private room of ``shared_utils.doctor``: what is looked at."""
