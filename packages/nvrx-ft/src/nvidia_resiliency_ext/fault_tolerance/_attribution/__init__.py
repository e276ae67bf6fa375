# SPDX-License-Identifier: Apache-2.0
"""The launcher and the attribution service: where it is, running it, and what its word leads to."""
