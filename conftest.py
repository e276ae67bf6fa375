# SPDX-License-Identifier: Apache-2.0
"""What every test run of this repository loads, whichever tests it is given."""

pytest_plugins = ["hostile", "outcomes", "short_paths"]
