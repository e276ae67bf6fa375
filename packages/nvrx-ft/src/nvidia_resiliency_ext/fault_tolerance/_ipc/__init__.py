# SPDX-License-Identifier: Apache-2.0
"""Messages and mailboxes on Unix sockets."""
