# SPDX-License-Identifier: Apache-2.0
"""Shared use of the one CUPTI profiler of a process."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["CuptiManager"]


class CuptiManager:
    """Reference counter over the extension's profiler; any thread may use it.

    Capture runs from the first `start_profiling` to the matching last `stop_profiling`.

    Args:
        bufferSize: Bytes of one CUPTI buffer. Default 1,000,000.
        numBuffers: Buffers that are made at the start; more are made when needed. Default 8.
        statsMaxLenPerKernel: Samples that are kept for each kernel. Default 4096.

    Raises:
        ImportError: The extension `nvrx_cupti_module` was not built.
        RuntimeError: Another profiler of the extension exists in this process.

    Attributes:
        cupti_ext: The profiler of the extension.
        started_cnt: Starts without a stop.
        is_initialized: Whether CUPTI is claimed.

    Example:
        >>> manager = CuptiManager()  # doctest: +SKIP
        >>> manager.initialize()  # doctest: +SKIP
        >>> manager.start_profiling()  # doctest: +SKIP
        >>> logits = model(batch)  # doctest: +SKIP
        >>> manager.stop_profiling()  # doctest: +SKIP
        >>> kernels = manager.get_results()  # doctest: +SKIP
    """

    def __init__(
        self,
        bufferSize: int = 1_000_000,  # noqa: N803 - given
        numBuffers: int = 8,  # noqa: N803
        statsMaxLenPerKernel: int = 4096,  # noqa: N803
    ) -> None:
        import nvrx_cupti_module

        self.cupti_ext: Any = nvrx_cupti_module.CuptiProfiler(
            bufferSize=bufferSize, numBuffers=numBuffers, statsMaxLenPerKernel=statsMaxLenPerKernel
        )
        self.started_cnt = 0
        self.is_initialized = False
        self._lock = threading.Lock()

    def initialize(self) -> None:
        """Claim CUPTI.

        Raises:
            RuntimeError: CUPTI is missing, busy or refuses; the text says why.
        """
        with self._lock:
            if not self.is_initialized:
                self.cupti_ext.initialize()
                self.is_initialized = True

    def shutdown(self) -> None:
        """Release CUPTI; a later `initialize` works."""
        with self._lock:
            if self.is_initialized:
                self.is_initialized = False
                self.started_cnt = 0
                self.cupti_ext.shutdown()

    def start_profiling(self) -> None:
        """Switch capture on, or count one more user of it.

        Raises:
            RuntimeError: Not initialised, or CUPTI refuses.
        """
        with self._lock:
            if self.started_cnt == 0:
                self.cupti_ext.start()
            self.started_cnt += 1

    def stop_profiling(self) -> None:
        """Undo one `start_profiling`; the last one switches capture off.

        Raises:
            RuntimeError: Not initialised, not started, or CUPTI refuses.
        """
        with self._lock:
            if self.started_cnt == 0:
                raise RuntimeError("kernel capture is not started; call start_profiling first")
            self.started_cnt -= 1
            if self.started_cnt == 0:
                self.cupti_ext.stop()

    def get_results(self) -> dict[str, Any]:
        """Return the statistics of each kernel since the last reset.

        Raises:
            RuntimeError: Not initialised.
        """
        with self._lock:
            results: dict[str, Any] = self.cupti_ext.get_stats()
            return results

    def reset_results(self) -> None:
        """Forget all statistics.

        Raises:
            RuntimeError: Not initialised.
        """
        with self._lock:
            self.cupti_ext.reset()
