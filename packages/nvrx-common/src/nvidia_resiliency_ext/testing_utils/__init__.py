# SPDX-License-Identifier: Apache-2.0
"""Logging, health checks, events and reports shared by the nvrx packages."""
