# SPDX-License-Identifier: Apache-2.0
"""What ranks agree on, iteration by iteration; `board.py` alone talks to a store."""
