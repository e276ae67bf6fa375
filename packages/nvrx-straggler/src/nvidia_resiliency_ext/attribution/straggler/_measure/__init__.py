# SPDX-License-Identifier: Apache-2.0
"""What a rank measures: sections, wrapped callables, GPU kernels."""
