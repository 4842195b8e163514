"""The HTTP service: images in, rows out, batched as they come.

Batches are made by the package `batched` (Mixedbread), which is small and sound where it matters here: a request that
is cancelled leaves the queue, and an error reaches those who wait. It gives one error to a whole batch, so that a batch
that fails is asked again one by one below; and its queue has no end, so that requests are counted before they enter it.
LitServe, the other candidate, leaves processes behind on SIGTERM and answers malformed bodies with 500.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from threading import Thread
from typing import Any, get_args
from urllib.parse import urlsplit

import torch
from torch import Tensor

import headtilt
from headtilt.apps.rows import Row, rows_of
from headtilt.apps.serve.limits import FORMATS, Body, Limits, RefusedError, Uploads, impatient
from headtilt.apps.serve.openapi import Answer, Explanation, Failure, Health, Ready, body_of, failures
from headtilt.apps.serve.pages import directory, documentation
from headtilt.apps.serve.semaphore import PrioritySemaphore
from headtilt.apps.serve.trace import picture, trace_of
from headtilt.errors import DataError, MissingExtraError
from headtilt.its import ITS
from headtilt.sources import Adapted
from headtilt.sources.decode import TooLargeError
from headtilt.sources.decoders import Decoders, KilledError, NoDecoderError, Outcome, OverdueError

try:
    from batched.aio import AsyncBatchProcessor
    from fastapi import FastAPI, Query, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        generate_latest,
    )
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise MissingExtraError((error.name or "fastapi").partition(".")[0], "serve") from error

log = logging.getLogger("headtilt.serve")
MOST_LABELS = 20  # that a request may ask for
LOOPBACK = ("127.0.0.1", "::1", "localhost")
DECODERS = 2  # processes of each lane; one slow image must not hold up all others
AHEAD = DECODERS + 1  # images that are given to a lane at a time: those at work, and one that is next
QUICK_SECONDS, QUICK_PIXELS, QUICK_BYTES = 1.0, 2_000_000, 500_000  # of images that stay in the first lane
ATTEMPTS = 30  # at a first image, which waits for its process to start
DOT = b"P5 1 1 255\n\x00"  # an image of one pixel
AFTERWARDS = 5  # seconds that ending may take once all answers are given or given up


def _wait_for_decoders(lane: Decoders, adapted: Adapted) -> None:
    """Wait until a lane decodes: on a busy machine its processes take longer to start than an image may."""
    for _ in range(ATTEMPTS):
        with suppress(OverdueError):
            lane.square_of(DOT, adapted)
            return
    lane.square_of(DOT, adapted)


class Service:
    """The search behind a queue: one thread computes, another draws, processes decode, and no more wait than allowed.

    Args:
        robust: The search.
        adapted: The classifier inside it.
        limits: What a request may cost.
    """

    def __init__(self, robust: ITS, adapted: Adapted, limits: Limits) -> None:
        self.robust, self.adapted, self.limits = robust, adapted, limits
        self.uploads = Uploads(limits)
        self.metrics = Metrics()
        self.lanes: tuple[Decoders, ...] = ()
        self.places = (PrioritySemaphore(AHEAD), PrioritySemaphore(AHEAD))
        self.inside, self.warm = 0, False

    @property
    def ready(self) -> bool:
        """Whether it answers: it is warm, and no image of ordinary cost waits for longer than it should."""
        return self.warm and not self.lanes[0].overdue() and self.places[0].waited() <= 2 * self.lanes[0].seconds

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run threads and batcher, warmed up, for as long as the context lasts."""
        self.computing = ThreadPoolExecutor(1, "search")
        self.drawing = ThreadPoolExecutor(1, "draw")
        limits = self.limits
        # Two lanes: what is heavy, or large or slow in the first, goes to the second and holds up nobody in the first.
        quick = min(QUICK_SECONDS, limits.decode_seconds)
        self.lanes = (
            Decoders(DECODERS, seconds=quick, most_pixels=min(QUICK_PIXELS, limits.pixels), formats=FORMATS),
            Decoders(DECODERS, seconds=limits.decode_seconds, most_pixels=limits.pixels, formats=FORMATS),
        )
        self.batcher = AsyncBatchProcessor(self._batch, batch_size=limits.batch, timeout_ms=limits.wait_ms)
        blank = torch.zeros(self.adapted.channels, self.adapted.size, self.adapted.size)
        await self._compute(self._rows, [blank])
        # The first image starts the processes.
        for lane in self.lanes:
            await asyncio.get_running_loop().run_in_executor(self.drawing, _wait_for_decoders, lane, self.adapted)
        self.warm = True
        try:
            yield
        finally:
            self.warm = False
            self.close()
            for pool in (self.computing, self.drawing):
                pool.shutdown(wait=False, cancel_futures=True)  # a search that never ends must not keep us from ending

    async def answer(self, request: Any, act: Callable[[Tensor], Awaitable[Any]]) -> Any:
        """Return what an action says of the image that a request carries, within all limits."""
        if not self.warm:
            raise RefusedError(503, "not ready.", {"Retry-After": "1"})
        body = await self.uploads.receive(request)
        if self.inside >= self.limits.queue:
            body.let_go()
            raise RefusedError(503, "too many requests are waiting.", {"Retry-After": "1"})
        self.inside += 1
        try:
            return await asyncio.wait_for(self._act(body, act), self.limits.answer_seconds)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise RefusedError(503, "the answer took too long.", {"Retry-After": "5"}) from error
        finally:
            self.inside -= 1
            body.let_go()

    async def _act(self, body: Body, act: Callable[[Tensor], Awaitable[Any]]) -> Any:
        if not body.content:
            raise RefusedError(422, "the body is empty.")
        try:
            image = await self._decoded(body)
            self.metrics.decodes.labels("done").inc()
        except NoDecoderError as error:
            raise RefusedError(503, "no image can be decoded now.", {"Retry-After": "5"}) from error
        except DataError as error:
            status, outcome, reason = next(why for kind, why in self._refusals().items() if isinstance(error, kind))
            self.metrics.decodes.labels(outcome).inc()
            raise RefusedError(status, reason) from error
        finally:
            body.let_go()
        return await act(image)

    async def _decoded(self, body: Body) -> Tensor:
        if len(body.content) <= QUICK_BYTES:
            with suppress(TooLargeError, OverdueError, KilledError):
                return await self._decoded_in(0, body)
        return await self._decoded_in(1, body)

    async def _decoded_in(self, lane: int, body: Body) -> Tensor:
        async with self.places[lane].acquired(len(body.content)):
            return await asyncio.wrap_future(self.lanes[lane].submit(body.content, self.adapted.square))

    def _refusals(self) -> dict[type[DataError], tuple[int, str, str]]:
        """Return status, outcome and reason by what became of an image, the special before the general."""
        return {
            TooLargeError: (413, "refused", f"an image may have at most {self.limits.pixels:,} pixels, and few scans."),
            OverdueError: (422, "timed_out", "the image takes too long to decode."),
            KilledError: (422, "killed", "the image takes too much memory to decode."),
            DataError: (422, "refused", "the file is no image of a known format, or it is broken."),
        }

    def close(self) -> None:
        """End the processes that decode."""
        for lane in self.lanes:
            lane.close()

    async def classify(self, image: Tensor) -> Row:
        """Return the row of a prepared image, searched together with those of other requests."""
        found = await self.batcher(image)
        if isinstance(found, Exception):
            raise found
        row: Row = found
        return row

    async def explain(self, image: Tensor, kind: str) -> Any:
        """Return the search of a prepared image, as plain values or as a picture."""
        result = await self._compute(self.robust.search, image[None])
        make = picture if kind == "png" else trace_of
        # Drawing takes longer than searching, and must not hold up those who wait for a search.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.drawing, make, result, self.adapted.labels)

    async def _batch(self, images: list[Tensor]) -> list[Row | Exception]:
        """Return a row or an error for each image; one that fails does so alone."""
        self.metrics.batches.observe(len(images))
        try:
            return list(await self._compute(self._rows, images))
        except Exception as error:
            if len(images) == 1:
                return [error]
            log.exception("a batch of %d failed; its images are asked one by one", len(images))
            return [answer for image in images for answer in await self._batch([image])]

    def _rows(self, images: list[Tensor]) -> list[Row]:
        found = self.robust.search(torch.stack(images))
        rows = rows_of(found, [""] * len(images), self.adapted.labels, topk=MOST_LABELS)
        self.metrics.views.inc(sum(row.views or 0 for row in rows))
        return rows

    async def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.computing, function, *arguments)


class Metrics:
    """What Prometheus reads, in a registry of its own, so that several services may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("headtilt_requests", "Requests.", ["route", "status"], registry=self.registry)
        self.seconds = Histogram("headtilt_seconds", "Time to the answer.", ["route"], registry=self.registry)
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
        self.batches = Histogram("headtilt_batch_images", "Images per search.", buckets=sizes, registry=self.registry)
        self.views = Counter("headtilt_views", "Views that the model was shown.", registry=self.registry)
        self.inside = Gauge("headtilt_inside", "Requests that wait or are computed.", registry=self.registry)
        self.decodes = Counter("headtilt_decodes", "Images by outcome.", ["outcome"], registry=self.registry)
        for outcome in get_args(Outcome):
            self.decodes.labels(outcome)  # there from the start, so that rates can be computed


def make_app(robust: ITS, adapted: Adapted, limits: Limits | None = None, *, hosts: Sequence[str] = LOOPBACK) -> Any:
    """Return the service as an ASGI application.

    Args:
        robust: The search.
        adapted: The classifier inside it.
        limits: What a request may cost.
        hosts: Names under which it may be addressed, so that no page of elsewhere can reach it by a name of its own;
            "*" allows all.
    """
    service = Service(robust, adapted, limits or Limits())

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with service.open():
            yield

    # The usual pages of documentation load scripts from elsewhere; /docs below does not.
    app = FastAPI(
        title="headtilt",
        version=headtilt.__version__,
        description="A classifier that tilts its head.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    _guard(app, service, hosts)
    _routes(app, service)
    return app


def _routes(app: Any, service: Service) -> None:
    async def classify(
        request: Request, topk: int = Query(1, ge=1, le=MOST_LABELS, description="How many of the best labels to give.")
    ) -> Any:
        """Return the class of an image and how it was found tilted."""
        row = (await service.answer(request, service.classify)).as_dict()
        best = row.pop("top")[:topk]
        found = {name: value for name, value in row.items() if name not in ("path", "error")}
        return found if topk == 1 else {**found, "top": best}

    async def explain(
        request: Request,
        format: str = Query("json", pattern="^(json|png)$", description="json or png."),  # noqa: A002
    ) -> Any:
        """Return the search of an image: every level and rival as JSON, or a picture."""
        found = await service.answer(request, lambda image: service.explain(image, format))
        return Response(found, media_type="image/png") if isinstance(found, bytes) else found

    async def healthz() -> Any:
        """Return that the process lives."""
        return {"status": "ok"}

    async def readyz() -> Any:
        """Return which model answers, once it does."""
        if not service.ready:
            raise RefusedError(503, "not ready.", {"Retry-After": "1"})
        return {"status": "ready", "model": service.adapted.name, "labels": service.adapted.labels}

    async def metrics() -> Response:
        """Return what Prometheus reads."""
        service.metrics.inside.set(service.inside)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def root() -> Any:
        """Return where to look."""
        return directory(service.adapted.name)

    async def docs(request: Request) -> HTMLResponse:
        """Return this service's documentation for people, which loads nothing from elsewhere."""
        return HTMLResponse(documentation(app.openapi(), service.adapted.name, str(request.base_url).rstrip("/")))

    app.get("/", include_in_schema=False)(root)
    app.get("/docs", include_in_schema=False)(docs)
    refusals = failures(400, 408, 413, 415, 422, 503)
    pictured: dict[int | str, Any] = {200: {"content": {"image/png": {"schema": {"type": "string"}}}}}
    image = {"openapi_extra": body_of()}
    answered: dict[str, Any] = {"response_model": Answer, "response_model_exclude_unset": True}
    app.post("/classify", responses=refusals, **answered, **image)(classify)
    told: dict[str, Any] = {"response_model": Explanation, "response_model_exclude_unset": True}
    app.post("/explain", responses=refusals | pictured, **told, **image)(explain)
    app.get("/healthz", response_model=Health)(healthz)
    app.get("/readyz", response_model=Ready, responses=failures(503))(readyz)
    app.head("/healthz", include_in_schema=False)(healthz)
    app.head("/readyz", include_in_schema=False)(readyz)
    text = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    app.get("/metrics", response_class=Response, responses=text)(metrics)


def _guard(app: Any, service: Service, hosts: Sequence[str]) -> None:
    """Count and time requests, and answer every failure with a sentence that tells nothing of this machine."""

    def failure_reply(status: int, reason: str, headers: Any = None) -> JSONResponse:
        return JSONResponse(Failure(error=reason).model_dump(), status, headers)

    async def refused(_: Request, error: Any) -> JSONResponse:
        _forget_frames(error)
        return failure_reply(error.status, error.reason, error.headers)

    async def plain(_: Request, error: Any) -> JSONResponse:
        return failure_reply(error.status_code, str(error.detail), error.headers)

    async def invalid(_: Request, error: Any) -> JSONResponse:
        return failure_reply(422, "; ".join(f"{entry['loc'][-1]}: {entry['msg']}" for entry in error.errors()))

    async def broken(_: Request, error: Exception) -> JSONResponse:  # noqa: ARG001 - uvicorn's log has it
        return failure_reply(500, "internal error.")

    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, broken)
    app.add_middleware(Doorkeeper, hosts=hosts)
    app.add_middleware(Counting, metrics=service.metrics)


def _forget_frames(error: BaseException | None) -> None:
    """Let go what the frames of an error and of its causes hold: a task holds its error, whose frames hold the task.

    Bytes of a body would stay in that circle until garbage is collected, which may be much later.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Doorkeeper:
    """Refuses requests that are addressed to another host, and those whose length is said in two ways.

    Args:
        app: What answers all others.
        hosts: Names under which it may be addressed; "*" allows all.
    """

    def __init__(self, app: Any, hosts: Sequence[str]) -> None:
        self.app, self.hosts = app, {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        reason = self._wrong(dict(scope["headers"])) if scope["type"] == "http" else None
        if reason is None:
            await self.app(scope, receive, send)
            return
        reply = JSONResponse(Failure(error=reason).model_dump(), 400, {"Connection": "close"})
        await reply(scope, receive, send)

    def _wrong(self, headers: dict[bytes, bytes]) -> str | None:
        if b"transfer-encoding" in headers and b"content-length" in headers:
            return "say the length of the body, or send it in chunks, not both."
        try:
            host = urlsplit("//" + headers.get(b"host", b"").decode("latin-1")).hostname or ""
        except ValueError:
            host = ""
        return None if "*" in self.hosts or host in self.hosts else "this host is not served here; see --allow-host."


class Counting:
    """Counts and times requests by route and status.

    Args:
        app: What answers them.
        metrics: Where they are counted.
    """

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def noting(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            # Never the path that the client wrote: labels must be few.
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - start)


def serve(app: Any, host: str, port: int, limits: Limits) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that are inside are answered first, for as long as answers may take."""
    import uvicorn

    grace = int(limits.answer_seconds) + AFTERWARDS
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=impatient(limits.upload_seconds),
        ws="none",
        log_level="warning",
        server_header=False,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=grace,
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = uvicorn.Server(config)
    Thread(target=_end_at_last, args=(server, app.state.service, grace + AFTERWARDS), daemon=True).start()
    server.run()
    if not server.started:
        sys.exit(3)


def _end_at_last(server: Any, service: Service, seconds: float) -> None:
    """End the process some time after it was told to, whatever is still being computed."""
    while not server.should_exit:
        time.sleep(0.2)
    time.sleep(seconds)
    log.error("something did not end within %g s, and is given up", seconds)
    service.close()
    os._exit(1)
