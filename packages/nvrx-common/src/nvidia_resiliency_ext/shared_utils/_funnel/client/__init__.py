# SPDX-License-Identifier: Apache-2.0
"""The modules behind `grpc_log_client`, which puts them together; nothing else imports them."""
