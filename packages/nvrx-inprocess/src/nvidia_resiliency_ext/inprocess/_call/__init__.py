# SPDX-License-Identifier: Apache-2.0
"""One call of a wrapped function."""
