# SPDX-License-Identifier: Apache-2.0
"""Lightning callbacks for the nvrx packages; this version has no names yet."""

__all__: list[str] = []
