# SPDX-License-Identifier: Apache-2.0
"""Messages and services as protobuf has them; the modules need the extra `grpc`.

The `.proto` files are the source. What lies beside them is made by `tools/gen_proto.py`.
"""
