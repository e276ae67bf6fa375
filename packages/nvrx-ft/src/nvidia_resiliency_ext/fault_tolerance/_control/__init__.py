# SPDX-License-Identifier: Apache-2.0
"""A control plane off the compute nodes: it serves the job's store and decides its rounds."""
