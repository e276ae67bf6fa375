# SPDX-License-Identifier: Apache-2.0
"""The file of one rank's local checkpoint: its layout, and how it is written, read and checked."""
