# SPDX-License-Identifier: Apache-2.0
"""Private rooms of ``shared_utils.attribution_client``: what to ask when."""
