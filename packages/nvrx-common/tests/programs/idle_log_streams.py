# SPDX-License-Identifier: Apache-2.0
"""Opens many acknowledged log streams that say nothing, says so, and holds them until stdin ends.

usage: idle_log_streams.py ADDRESS COUNT
"""

import asyncio
import os
import sys

import grpc.aio

from nvidia_resiliency_ext.shared_utils.proto import log_aggregation_pb2_grpc as service


async def main(address: str, count: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = service.LogAggregationServiceStub(channel)
        calls = [stub.StreamLogsAcked() for _ in range(count)]
        for call in calls:
            await call.initial_metadata()
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        # Older versions of grpc.aio wait at the end of a channel for calls that were cancelled.
        os._exit(0)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
