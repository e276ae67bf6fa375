# SPDX-License-Identifier: Apache-2.0
"""Where this node stands in the cluster, from its environment."""
