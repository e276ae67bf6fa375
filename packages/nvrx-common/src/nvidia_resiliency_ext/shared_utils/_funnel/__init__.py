# SPDX-License-Identifier: Apache-2.0
"""The rooms behind the log funnel's servers and client."""
