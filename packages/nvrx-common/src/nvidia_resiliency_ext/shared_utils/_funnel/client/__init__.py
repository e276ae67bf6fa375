# SPDX-License-Identifier: Apache-2.0
"""The modules behind `grpc_log_client`, which puts them together; nothing else imports them.

`stream` decides what is sent when and touches nothing; `limits` has the values that all share;
`spill` is the queue in files, with their directories; threads meet in `send_buffer` only, which has
the one that sends; `link` has gRPC.
"""
