# SPDX-License-Identifier: Apache-2.0
"""Private modules of ``shared_utils.events``: kinds, writer, reader."""
