# SPDX-License-Identifier: Apache-2.0
"""The attribution service as a child of the store host: start it, see that it answers, end it."""

from __future__ import annotations

import http.client
import importlib.util
import logging
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Mapping

from nvidia_resiliency_ext.shared_utils.children import Child, start_child
from nvidia_resiliency_ext.shared_utils.clock import Deadline
from nvidia_resiliency_ext.shared_utils.errors import NvrxError
from nvidia_resiliency_ext.shared_utils.os_utils import read_regular_file

from .endpoint import DEFAULT_ATTRIBUTION_PORT, MANAGED_HOST, is_served
from .settings import AttributionConfig, AttributionEndpoint

__all__ = ["AttributionManager", "AttributionMissingError", "is_installed", "state_dir"]

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
    """The service that the store host runs, or the address of another one.

    Args:
        cfg: What was asked for.
        is_store_host: Whether this launcher is the one that runs it.
        environ: The environment that the service gets; ours if None.
        state_dir: Private directory for what the service remembers, where its environment names
            none; None: it remembers nothing when it is started again.
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

        Returns:
            Where to ask; None when nobody is to be asked from here.

        Raises:
            ValueError: The key file that was named cannot be read.
            AttributionMissingError: The service is not installed.
            TimeoutError: It does not answer in time; it is ended.
            NvrxError: It cannot be started.
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
        if not is_served(cfg.endpoint):
            logger.warning("attribution is off: nothing serves %s", cfg.endpoint)
            return None
        return cfg.client_endpoint

    def launch(self) -> bool:
        """Start the service if this launcher runs it; return whether there is one to wait for.

        Raises: as `start_if_needed`, without waiting.
        """
        if not (self._cfg.is_managed and self._is_store_host):
            return False
        environment = self._environment()
        argv = _command()
        log_fd = _open_log(self._cfg.log_file)
        try:
            # The kernel ends it with this thread, which is the launcher's main one.
            self._child = start_child(
                argv,
                env=environment,
                stdout=log_fd,
                stderr=log_fd,
                die_with_parent=True,
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
        """Wait until the service answers; in any thread.

        Raises:
            TimeoutError: It does not in time, or it has ended.
        """
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
    """Return where a managed service keeps what it knows of a job.

    Args:
        log_file: The service's log.
        job_id: The job's name; None: it has none by which it could be started again.
        run_dir: The launcher's private directory, which goes with the job.
    """
    name = re.sub(r"[^\w.-]", "_", job_id or "", flags=re.ASCII)[:_LONGEST_NAME]
    if log_file is None or name in {"", ".", ".."}:
        return os.path.join(run_dir, "attribution")
    return os.path.join(f"{os.path.splitext(log_file)[0]}_state", name)


def is_installed() -> bool:
    """Return whether the service can be started here."""
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
    try:
        if not read_regular_file(path, _KEY_LIMIT_BYTES, follows_symlink=True).strip():
            why = "it is empty"
        else:
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
