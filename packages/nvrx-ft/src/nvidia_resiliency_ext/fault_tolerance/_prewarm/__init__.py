# SPDX-License-Identifier: Apache-2.0
"""Standby workers: started early, imports done, held at the door until a cycle needs them."""
