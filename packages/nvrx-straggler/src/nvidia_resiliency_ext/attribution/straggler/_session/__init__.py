# SPDX-License-Identifier: Apache-2.0
"""One life of the detector, its settings, and how they are changed from outside."""
