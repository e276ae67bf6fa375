# SPDX-License-Identifier: Apache-2.0
"""One streaming pass over a log: which lines matter, what they mean, which fault was first."""
