# SPDX-License-Identifier: Apache-2.0
"""Workers' output: one file for each cycle, written beside the job."""
