# SPDX-License-Identifier: Apache-2.0
"""The public names of nvrx-attribution; it holds no code.

``nvidia_resiliency_ext.attribution`` (a file of nvrx-common) forwards exactly these names.
"""

__all__: list[str] = []
