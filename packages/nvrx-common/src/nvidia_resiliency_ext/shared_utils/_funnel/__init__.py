# SPDX-License-Identifier: Apache-2.0
"""The modules behind the log funnel's servers and client."""
