# SPDX-License-Identifier: Apache-2.0
"""Find slow GPUs and slow ranks; this version has no names yet."""

__all__: list[str] = []
