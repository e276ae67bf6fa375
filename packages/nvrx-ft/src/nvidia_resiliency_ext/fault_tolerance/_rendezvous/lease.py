# SPDX-License-Identifier: Apache-2.0
"""How old a lease may grow before who does what, in leases. Each side counts by its own clock."""

from __future__ import annotations

# A living node's lease is never older than this.
LEASES_IN_DOUBT = 1.5
# A node that cannot renew its lease stops its workers then, before its peers act.
LEASES_TO_FENCE = 2.0
# So long have its workers between SIGTERM and SIGKILL.
FENCE_STOP_LEASES = 0.5
# The rank monitor kills the workers then, should their launcher be stopped or stuck.
LEASES_TO_KILL = 2.6
# The host counts the node as lost then, and the node itself gives up.
LEASES_TO_EXPIRY = 3.0
