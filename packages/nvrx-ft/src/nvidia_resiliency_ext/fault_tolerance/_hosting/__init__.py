# SPDX-License-Identifier: Apache-2.0
"""What the host of a job runs, be it a launcher or `nvrx-control`: store, rounds and services."""
