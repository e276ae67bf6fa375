# SPDX-License-Identifier: Apache-2.0
"""The launcher of one node: events in, decisions, effects out."""
