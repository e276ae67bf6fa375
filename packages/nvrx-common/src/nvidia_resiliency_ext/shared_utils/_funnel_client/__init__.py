# SPDX-License-Identifier: Apache-2.0
"""The rooms behind `grpc_log_client`; nothing outside imports them.

`chunks`, `stream`, `pace` and `verdict` decide and touch nothing; `room` counts; `spill` owns
the queue in files, `spill_segment` one file, `spill_place` their directories, `access` secrets,
`link` gRPC, `notices` lines for people; `feed` is where threads meet; `lane` owns the thread of a
target; `target` is what a program writes to; `client` puts them together.
"""
