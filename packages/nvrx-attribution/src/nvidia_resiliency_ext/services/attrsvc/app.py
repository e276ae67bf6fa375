# SPDX-License-Identifier: Apache-2.0
"""The routes of the service on FastAPI, over `AttributionController`."""

# Without postponed annotations: FastAPI reads those of the routes, whose types are imported when
# the application is made.
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

from nvidia_resiliency_ext.attribution.controller import (
    AttributionController,
    AttributionControllerConfig,
)
from nvidia_resiliency_ext.attribution.orchestration.config import ErrorCode
from nvidia_resiliency_ext.attribution.orchestration.types import LogAnalyzerError
from nvidia_resiliency_ext.services.attrsvc.limits import RateLimiter
from nvidia_resiliency_ext.services.attrsvc.page import PAGE
from nvidia_resiliency_ext.services.attrsvc.settings import Settings
from nvidia_resiliency_ext.shared_utils.attribution_wire import ROUTE_HEALTHZ, ROUTE_LOGS
from nvidia_resiliency_ext.shared_utils.credentials import TokenFile
from nvidia_resiliency_ext.shared_utils.errors import MissingExtraError

if TYPE_CHECKING:
    from fastapi import FastAPI, Response

__all__ = ["AttributionHttpAdapter", "create_app"]

_BODY_BYTES = 64 << 10
_BODY_S = 10.0  # for all of it
_OPEN_ROUTES = frozenset({"/", ROUTE_HEALTHZ})
_MOST_INDENT = 8
_MOST_EVIDENCE = 16
_LONGEST_EVIDENCE = 2000
_MOST_JOBS = 1000
_HIGHEST = 1 << 31
_UNAVAILABLE = 503
_TOO_MANY = 429
_NAMES_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 429: "rate_limited"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
}


class AttributionHttpAdapter:
    """Turn requests into calls of a controller, and results into JSON objects.

    Args:
        cfg: The settings.

    Raises:
        ConfigError: A setting is wrong.
        OSError: The state directory cannot be used.
    """

    def __init__(self, cfg: AttributionControllerConfig) -> None:
        self.controller = AttributionController(cfg)

    async def submit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer `POST /logs`; errors as for `Analyzer.submit`.

        Args:
            body: The decoded fields of the request.
        """
        result = await self.controller.submit_log(body.pop("log_path"), **body)
        return result.to_payload()

    async def result(
        self, log_path: str, file: str | None, wl_restart: int | None, *, wait: bool
    ) -> dict[str, Any]:
        """Answer `GET /logs`; errors as for `Analyzer.analyze`.

        Args:
            log_path: The log.
            file: Name of one file of a split log.
            wl_restart: Index of the file, from 0; None: the newest.
            wait: Reply only when the analysis has ended.
        """
        found = await self.controller.analyze_log(
            log_path, file=file, wl_restart=wl_restart, wait=wait
        )
        return found.to_payload()


def create_app(settings: Settings) -> "FastAPI":
    """Return the ASGI application.

    Args:
        settings: The settings.

    Raises:
        MissingExtraError: FastAPI is not installed.
        ConfigError: The token file cannot be read.

    Example:
        >>> create_app(Settings(allowed_root="/logs")).title
        'nvrx-attrsvc'
    """
    try:
        from fastapi import FastAPI
    except ImportError as error:
        raise MissingExtraError("nvrx-attrsvc", "'nvrx-attribution[service]'", error) from None

    if settings.token_file is not None:
        TokenFile(settings.token_file)  # a wrong one is to be known before the first request
    service = _Service(settings)
    app = FastAPI(title="nvrx-attrsvc", version="1", lifespan=service.lifespan, docs_url=None)
    app.add_middleware(_Guard, token_file=settings.token_file)
    _add_error_replies(app)
    _add_log_routes(app, service)
    _add_status_routes(app, service)
    return app


class _Service:
    """Shared state of the routes: the adapter while the application runs, and the limits."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limiters = {name: RateLimiter(rate) for name, rate in settings.rates.items()}
        self._adapter: AttributionHttpAdapter | None = None

    @property
    def adapter(self) -> AttributionHttpAdapter:
        assert self._adapter is not None
        return self._adapter

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        """Run the controller as long as the application."""
        self._adapter = AttributionHttpAdapter(self._settings.controller_config())
        await self.adapter.controller.start()
        try:
            yield
        finally:
            await self.adapter.controller.shutdown_async()

    def limit(self, request: Any, kind: str) -> None:
        """Take one of the client's permits; answer 429 when there is none."""
        from starlette.exceptions import HTTPException

        client = request.client.host if request.client is not None else "unix"
        wait_s = self._limiters[kind].wait_s(client, time.monotonic())
        if wait_s > 0:
            headers = {"Retry-After": str(int(wait_s) + 1)}
            raise HTTPException(_TOO_MANY, "too many requests", headers)


def _add_error_replies(app: "FastAPI") -> None:
    """Give every error the form `{"error_code", "message", "details"}`."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    @app.exception_handler(LogAnalyzerError)
    async def refused(_: Request, error: LogAnalyzerError) -> JSONResponse:
        body = _error(error.error_code.value, error.message)
        return JSONResponse(body, error.error_code.http_status)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        found = [
            {"where": ".".join(map(str, item["loc"])), "message": item["msg"]}
            for item in error.errors()[:10]
        ]
        message = "; ".join(f"{item['where']}: {item['message']}" for item in found)
        code = ErrorCode.INVALID_PARAMETER
        return JSONResponse(_error(code.value, message, found), code.http_status)

    @app.exception_handler(HTTPException)
    async def failed(_: Request, error: HTTPException) -> JSONResponse:
        code = _NAMES_OF_STATUS.get(error.status_code, ErrorCode.INVALID_PARAMETER.value)
        body = _error(code, str(error.detail))
        return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))


def _add_log_routes(app: "FastAPI", service: _Service) -> None:
    from fastapi import Query, Request, Response
    from fastapi.responses import PlainTextResponse
    from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr

    Evidence = Annotated[StrictStr, Field(max_length=_LONGEST_EVIDENCE)]  # noqa: N806 - a type

    class Submission(BaseModel):
        """Body of a submission."""

        log_path: StrictStr
        user: StrictStr = "unknown"
        job_id: StrictStr | None = None
        cycle_id: StrictInt | None = None
        analysis_intent: StrictStr | None = None
        log_complete: StrictBool = False
        evidence: Annotated[list[Evidence], Field(max_length=_MOST_EVIDENCE)] = []
        attempt_index: Annotated[StrictInt, Field(ge=0, le=_HIGHEST)] | None = None

    @app.post(ROUTE_LOGS)
    async def submit(request: Request, body: Submission) -> Response:
        service.limit(request, "submit")
        return _reply(request, await service.adapter.submit(body.model_dump()))

    @app.get(ROUTE_LOGS)
    async def result(
        request: Request,
        log_path: str,
        file: str | None = None,
        wl_restart: Annotated[int | None, Query(ge=0, le=_HIGHEST)] = None,
        *,
        wait: bool = True,
    ) -> Response:
        if wait:
            service.limit(request, "analyze")
        found = await service.adapter.result(log_path, file, wl_restart, wait=wait)
        return _reply(request, found)

    @app.get("/print")
    async def preview(request: Request, log_path: str) -> PlainTextResponse:
        service.limit(request, "preview")
        found = await asyncio.to_thread(service.adapter.controller.read_file_preview, log_path)
        return PlainTextResponse(found.content)


def _add_status_routes(app: "FastAPI", service: _Service) -> None:
    from fastapi import Request, Response
    from fastapi.responses import HTMLResponse

    @app.get(ROUTE_HEALTHZ)
    async def health(request: Request) -> Response:
        status = service.adapter.controller.status()
        return _reply(request, status, _UNAVAILABLE if status["status"] == "fail" else 200)

    @app.get("/stats")
    async def stats(request: Request) -> Response:
        return _reply(request, service.adapter.controller.get_stats())

    @app.get("/jobs")
    async def jobs(request: Request) -> Response:
        found = service.adapter.controller.get_all_jobs()
        return _reply(request, {"count": len(found), "jobs": found[-_MOST_JOBS:]})

    @app.get("/inflight")
    async def inflight(request: Request) -> Response:
        return _reply(request, service.adapter.controller.get_inflight())

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=_PAGE_HEADERS)


def _reply(request: Any, value: Any, status: int = 200) -> "Response":
    """Return a JSON reply, indented where the query has `pretty` or `indent`."""
    from fastapi import Response

    query = request.query_params
    indent = None
    if "pretty" in query or "indent" in query:
        given = query.get("indent", "2")
        is_number = given.isascii() and given.isdigit()
        indent = min(int(given[:4]), _MOST_INDENT) if is_number else 2
    return Response(json.dumps(value, indent=indent), status, media_type="application/json")


class _Guard:
    """Refuse requests without the token, and bodies that are too large.

    Args:
        app: What is guarded.
        token_file: File with the token; None: none is asked for.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(self, app: Any, token_file: str | None) -> None:
        self._app = app
        self._token = None if token_file is None else TokenFile(token_file)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._token is not None and scope["path"] not in _OPEN_ROUTES:
            given = headers.get(b"authorization")
            if not self._token.admits(given):
                await _answer(send, 401, _error("unauthorized", "a bearer token is needed"))
                return
        length = headers.get(b"content-length", b"0")
        body = bytearray()
        is_large = not length.isdigit() or int(length[:12]) > _BODY_BYTES
        more = scope["method"] not in {"GET", "HEAD"}
        deadline_s = time.monotonic() + _BODY_S
        while more and not is_large:
            try:
                message = await asyncio.wait_for(receive(), deadline_s - time.monotonic())
            except (asyncio.TimeoutError, TimeoutError):
                text = f"the body did not come within {_BODY_S:g} s"
                await _answer(send, 408, _error("request_timeout", text))
                return
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            is_large = len(body) > _BODY_BYTES
        if is_large:
            await _answer(send, 413, _error("too_large", f"a body has at most {_BODY_BYTES} bytes"))
            return
        given_once = False

        async def whole() -> Any:
            nonlocal given_once
            if given_once:
                return await receive()
            given_once = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, whole, send)


async def _answer(send: Any, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _error(code: str, message: str, details: Any = None) -> dict[str, Any]:
    return {"error_code": code, "message": message, "details": details}
