# SPDX-License-Identifier: Apache-2.0
"""How ranks are numbered and who of them is active: decisions only."""
