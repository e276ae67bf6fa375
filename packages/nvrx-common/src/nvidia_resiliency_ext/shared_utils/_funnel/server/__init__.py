# SPDX-License-Identifier: Apache-2.0
"""The modules behind `grpc_log_server` and `grpc_log_leaf_server`."""
