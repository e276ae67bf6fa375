# SPDX-License-Identifier: Apache-2.0
"""Whether a node may join a round: checks, memory of GPUs, hosts that are bad."""
