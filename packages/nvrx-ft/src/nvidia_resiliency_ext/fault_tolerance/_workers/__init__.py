# SPDX-License-Identifier: Apache-2.0
"""The worker processes of one node: their command, environment, output, start and stop."""
