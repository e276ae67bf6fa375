# SPDX-License-Identifier: Apache-2.0
"""How what blocks the main thread is stopped."""
