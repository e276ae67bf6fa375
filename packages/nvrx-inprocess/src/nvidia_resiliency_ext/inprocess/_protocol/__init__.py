# SPDX-License-Identifier: Apache-2.0
"""What ranks agree on, iteration by iteration; `iteration_store.py` alone talks to a store."""
