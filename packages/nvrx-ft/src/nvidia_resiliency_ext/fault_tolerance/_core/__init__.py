# SPDX-License-Identifier: Apache-2.0
"""What launcher and monitor share: causes, errors, this node, restart budgets."""
