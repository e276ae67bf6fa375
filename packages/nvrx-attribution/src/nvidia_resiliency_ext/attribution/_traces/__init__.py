# SPDX-License-Identifier: Apache-2.0
"""Flight-recorder traces: loading them safely, finding the ranks that others wait for."""
