# SPDX-License-Identifier: Apache-2.0
"""The attribution service while a job runs: its process, what it is sent, what it answers."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from nvidia_resiliency_ext.fault_tolerance._config.attribution import (
    DEFAULT_ATTRIBUTION_PORT,
    MANAGED_HOST,
    AttributionConfig,
    AttributionEndpoint,
)
from nvidia_resiliency_ext.fault_tolerance._logs.lines import cycle_log_file
from nvidia_resiliency_ext.shared_utils.attribution_wire import ACTION_STOP
from nvidia_resiliency_ext.shared_utils.children import Child, start_child
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

if TYPE_CHECKING:
    from nvidia_resiliency_ext.shared_utils.attribution_client import AttributionService


logger = logging.getLogger("nvrx")
STOP_GRACE_S = 5.0
_MODULE = "nvidia_resiliency_ext.services.attrsvc"
_NEEDED = (_MODULE, "fastapi", "uvicorn")  # the module comes without what its extra brings
_PROGRAM = "nvrx-attrsvc"
_KEY_FILE = "LLM_API_KEY_FILE"
_STATE_DIR = "NVRX_ATTRSVC_STATE_DIR"
_LONGEST_NAME = 100
_PROBE_TIMEOUT_S = 1.0
_PROBE_PAUSE_S = 0.1
_KEY_LIMIT_BYTES = 1 << 16


class AttributionMissingError(NvrxError):
    """The package with the service is not installed."""


class AttributionManager:
    """The service that the rendezvous host runs, or the address of another one.

    Args:
        cfg: Endpoint, port and limits of the service.
        is_store_host: Whether this launcher is the one that runs it.
        environ: The environment that the service gets; ours if None.
        state_dir: For what it remembers over its restarts, where `environ` names no directory;
            None: it remembers nothing.
    """

    def __init__(
        self,
        cfg: AttributionConfig,
        *,
        is_store_host: bool,
        environ: Mapping[str, str] | None = None,
        state_dir: str | None = None,
    ) -> None:
        self._cfg = cfg
        self._is_store_host = is_store_host
        self._environ = dict(os.environ if environ is None else environ)
        self._state_dir = state_dir
        self._child: Child | None = None
        self._given_up = threading.Event()

    def start_if_needed(self) -> AttributionEndpoint | None:
        """Start the service if this launcher runs it, and wait until it answers.

        Returns where to ask; None when nobody is to be asked from here.

        Raises:
            ValueError: The key file that was named cannot be read.
            TimeoutError: It does not answer in time; it is ended.
            NvrxError: It is not installed (AttributionMissingError), or cannot be started.
        """
        if self.launch():
            try:
                self.wait_ready()
            except BaseException:  # whatever happens, the process must not stay behind
                self.stop()
                raise
        return self.endpoint

    @property
    def endpoint(self) -> AttributionEndpoint | None:
        """Where to ask from this launcher, or None."""
        cfg = self._cfg
        if cfg.endpoint is None or (cfg.is_managed and not self._is_store_host):
            return None
        if cfg.endpoint.startswith("grpc://"):  # taken for older scripts only
            logger.warning("attribution is off: nothing serves %s", cfg.endpoint)
            return None
        return cfg.client_endpoint

    def launch(self) -> bool:
        """Start the service if this launcher runs it; return whether there is one to wait for."""
        if not (self._cfg.is_managed and self._is_store_host):
            return False
        environment = self._environment()
        argv = _command()
        log_fd = _open_log(self._cfg.log_file)
        try:
            # The kernel ends it with this thread, which is the launcher's main one.
            self._child = start_child(
                argv, env=environment, stdout=log_fd, stderr=log_fd, die_with_parent=True
            )
        finally:
            if log_fd is not None:
                os.close(log_fd)
        logger.info(
            "the attribution service starts (pid %d), its log: %s",
            self._child.pid,
            self._cfg.log_file or "stderr",
        )
        return True

    def wait_ready(self) -> None:
        """Wait until the service answers; in any thread. Raises TimeoutError."""
        child = self._child
        assert child is not None
        deadline = Deadline.after(self._cfg.startup_timeout)
        where = f"{MANAGED_HOST}:{DEFAULT_ATTRIBUTION_PORT}"
        while not _answers():
            status = child.poll()
            if status is not None:
                raise TimeoutError(
                    f"the attribution service ended: {status.describe()}; see {self._cfg.log_file}"
                )
            if self._given_up.wait(_PROBE_PAUSE_S) or deadline.expired():
                raise TimeoutError(
                    f"the attribution service did not answer at {where} within"
                    f" {self._cfg.startup_timeout:g} s; see {self._cfg.log_file}"
                )

    def stop(self) -> None:
        """End the service: SIGTERM, 5 s, SIGKILL. Harmless when there is none."""
        self._given_up.set()
        child, self._child = self._child, None
        if child is None:
            return
        child.signal_group(signal.SIGTERM)
        if child.wait(STOP_GRACE_S) is None:
            logger.warning("the attribution service did not end in time: SIGKILL")
        child.signal_group(signal.SIGKILL)
        child.close()

    def _environment(self) -> dict[str, str]:
        cfg = self._cfg
        key_file = cfg.llm_api_key_file or self._environ.get(_KEY_FILE) or None
        if key_file is not None:
            _check_key_file(key_file)
        given = {
            _KEY_FILE: key_file,
            "NVRX_ATTRSVC_ENDPOINT": cfg.client_endpoint and cfg.client_endpoint.endpoint,
            "NVRX_ATTRSVC_ALLOWED_ROOT": cfg.applog_dir,
            "NVRX_ATTRSVC_LLM_BASE_URL": cfg.llm_base_url,
            "NVRX_ATTRSVC_LLM_MODEL": cfg.llm_model,
            "NVRX_ATTRSVC_ANALYSIS_BACKEND": cfg.analysis_backend,
            "NVRX_ATTRSVC_LOG_LEVEL": cfg.log_level,
            "NVRX_ATTRSVC_EXPORT_URL": cfg.export_url,
            _STATE_DIR: self._environ.get(_STATE_DIR) or self._state_dir,
        }
        return {**self._environ, **{name: text for name, text in given.items() if text}}


def state_dir(log_file: str | None, job_id: str | None, run_dir: str) -> str:
    """Return the folder of a service's state: beside its log; of nameless jobs in `run_dir`."""
    name = re.sub(r"[^\w.-]", "_", job_id or "", flags=re.ASCII)[:_LONGEST_NAME]
    if log_file is None or name in {"", ".", ".."}:
        return os.path.join(run_dir, "attribution")
    return os.path.join(f"{os.path.splitext(log_file)[0]}_state", name)


def is_installed() -> bool:
    try:
        _command()
    except AttributionMissingError:
        return False
    return True


def _command() -> list[str]:
    try:
        if all(importlib.util.find_spec(name) is not None for name in _NEEDED):
            return [sys.executable, "-m", _MODULE]
    except ModuleNotFoundError:
        pass  # no package of services at all
    program = shutil.which(_PROGRAM)
    if program is None:
        raise AttributionMissingError(
            "--ft-attribution-endpoint localhost: the attribution service is not installed;"
            " pip install 'nvrx-attribution[service]', or leave the flag out"
        )
    return [program]


def _check_key_file(path: str) -> None:
    why = "it is empty"
    try:
        if read_regular_file(path, _KEY_LIMIT_BYTES, follows_symlink=True).strip():
            return
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
    raise ValueError(f"--ft-attribution-llm-api-key-file {path}: {why}")


def _open_log(path: str | None) -> int | None:
    if path is None:
        return None
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise NvrxError(f"the log of the attribution service, {path}: {error.strerror}") from None


def _answers() -> bool:
    import http.client

    connection = http.client.HTTPConnection(
        MANAGED_HOST, DEFAULT_ATTRIBUTION_PORT, timeout=_PROBE_TIMEOUT_S
    )
    try:
        connection.request("GET", "/healthz")
        return 200 <= connection.getresponse().status < 300  # noqa: PLR2004 - the successes of HTTP
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


DRAIN_S = 0.3


@dataclass(eq=False)
class AttributionWatch:
    """Follows a job's cycles on its rendezvous host. `begin` and `ended` come from any thread."""

    manager: AttributionManager
    _: KW_ONLY
    base_log_file: str  # Prefix of the cycle logs.
    token_file: str | None
    node_id: str  # In profiling events.
    # Calls what it is given where `on_stop` is to be called.
    post: Callable[[Callable[[], None]], None]
    on_stop: Callable[[str], None]  # Gets the reason of the first STOP that is to be obeyed.
    # Gets bad nodes and why, in any thread; None: they are only logged.
    on_nodes: Callable[[tuple[str, ...], str], None] | None = None
    job_id: str | None = None
    log_complete: bool = False  # Nobody writes to a cycle's log when the cycle has ended.

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._client: AttributionService | None = None
        self._cycle: int | None = None
        self._has_ended = False
        # Calls for the client that wait: cycles may begin and end before the service answers.
        self._pending_calls: list[Callable[[AttributionService], object]] = []
        self._is_closed = False

    def start(self) -> None:
        """Start the service or find it; what goes wrong is one line, and the job goes on."""
        try:
            must_wait = self.manager.launch()
        except (NvrxError, OSError, ValueError) as error:
            logger.error("attribution is off: %s", error)  # noqa: TRY400 - one line says it
            return
        if must_wait:
            threading.Thread(
                target=self._connect_when_ready, name="nvrx-attribution-start", daemon=True
            ).start()
        else:
            self._connect()

    def begin(self, cycle: int) -> None:
        """Record that the workers of a cycle start: its log is there to be read."""
        with self._lock:
            if cycle == self._cycle or self._is_closed:
                return
            self._end()
            self._cycle, self._has_ended = cycle, False
            path = cycle_log_file(self.base_log_file, cycle)
            self._request(lambda client: client._submit_log(path, cycle))  # noqa: SLF001 - public

    def ended(self, evidence: tuple[str, ...] = ()) -> None:
        """Record that the present cycle is over."""
        with self._lock:
            self._end(evidence)

    def close(self, *, asks: bool = True) -> None:
        """End the service; pending requests have a moment. Ask for the last verdict if `asks`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if asks:
                self._end()
            client, self._client = self._client, None
        if client is not None:
            client.stop_poller(DRAIN_S)
        self.manager.stop()

    def _end(self, evidence: tuple[str, ...] = ()) -> None:
        """Ask for the verdict on the present cycle, once; the lock is held."""
        if self._cycle is not None and not self._has_ended:
            self._has_ended = True
            self._request(lambda client: client.request_terminal_analysis(evidence))

    def _request(self, call: Callable[[AttributionService], object]) -> None:
        """Hand a call to the client once there is one; the lock is held."""
        if self._client is not None:
            call(self._client)
        else:
            self._pending_calls.append(call)

    def _connect_when_ready(self) -> None:
        try:
            self.manager.wait_ready()
        except TimeoutError as error:
            if not self._is_closed:
                logger.error("attribution is off: %s", error)  # noqa: TRY400 - one line says it
            return
        self._connect()

    def _connect(self) -> None:
        endpoint = self.manager.endpoint
        if endpoint is None:
            return
        from nvidia_resiliency_ext.shared_utils.attribution_client import AttributionService

        client = AttributionService(
            endpoint.endpoint,
            enforce_stop=endpoint.enforce_stop,
            token_file=self.token_file,
            job_id=self.job_id,
            log_complete=self.log_complete,
            on_verdict=self._on_verdict,
            on_nodes=self._on_bad_nodes,
        )
        client.start_poller(self.node_id)
        with self._lock:
            is_late = self._is_closed
            if not is_late:
                self._client = client
                for call in self._pending_calls:
                    call(client)
                self._pending_calls.clear()
        if is_late:
            # Nobody else knows of it. Its poller takes the lock.
            client.stop_poller(0.0)

    def _on_verdict(self, action: str, log_path: str, reason: str) -> None:
        """Take a verdict, in the client's thread."""
        client = self._client
        if action != ACTION_STOP or client is None:
            return
        count = client.stop_verdict_count()
        logger.error(
            "attribution: STOP, a restart is useless (%d so far): %s: %s", count, log_path, reason
        )

        def stop() -> None:
            if not self._is_closed:
                self.on_stop(reason or log_path)

        if client.stop_requested():
            self.post(stop)

    def _on_bad_nodes(self, nodes: tuple[str, ...], log_path: str, reason: str) -> None:
        """Take the names of bad nodes, in the client's thread."""
        names = ", ".join(nodes)
        logger.warning("attribution: bad nodes: %s: %s: %s", names, log_path, reason)
        if self.on_nodes is not None:
            self.on_nodes(nodes, reason or log_path)
