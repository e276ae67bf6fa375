# SPDX-License-Identifier: Apache-2.0
"""Torch's own classes over the rooms of the launcher: rendezvous handlers, and an elastic agent.

They serve programs that bring torch's agent or their own store. `ft_launcher` uses none of them.
"""
