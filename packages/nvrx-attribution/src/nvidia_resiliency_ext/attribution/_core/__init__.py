# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of all layers: errors, actions and the verdict; it reads and decides nothing."""
