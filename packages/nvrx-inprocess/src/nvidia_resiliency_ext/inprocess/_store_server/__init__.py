# SPDX-License-Identifier: Apache-2.0
"""Start and run the process that serves a job's store."""
