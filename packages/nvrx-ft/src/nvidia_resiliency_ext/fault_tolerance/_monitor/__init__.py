# SPDX-License-Identifier: Apache-2.0
"""The rank monitor and its client: shared slots, verdicts, the monitor process, the rank's side."""
