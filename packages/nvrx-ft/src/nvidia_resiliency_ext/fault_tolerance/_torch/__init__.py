# SPDX-License-Identifier: Apache-2.0
"""Torch's classes over the launcher: rendezvous handlers, elastic agent, `elastic_launch`."""
