# SPDX-License-Identifier: Apache-2.0
"""The loop of one wrapped call in its rank."""
