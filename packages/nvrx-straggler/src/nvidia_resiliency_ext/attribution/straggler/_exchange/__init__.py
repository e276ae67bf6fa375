# SPDX-License-Identifier: Apache-2.0
"""How the ranks make a report together."""
