"""``/metrics``: what Prometheus scrapes, served beside a job while it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sftriage.errors import UsageError
from sftriage.web.access import Access
from sftriage.web.app import application
from sftriage.web.serving import BackgroundServer, address, listen

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PATH = "/metrics"
STOP_GRACE_S = 2


def metrics_app(registry: CollectorRegistry, access: Access) -> ASGIApp:
    """What answers, in the format that is asked for; always with all metrics."""
    # Whoever made the registry has imported it, as the metrics of one process.
    from prometheus_client.exposition import choose_encoder

    def metrics(request: Request) -> Response:
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=media_type)

    route = Route(PATH, metrics, middleware=[Middleware(GZipMiddleware)])
    # With a token there is nothing to be had by having a name point here, and scrapers come by many names.
    return application([route], replace(access, any_name=access.token_sha256 is not None))


class MetricsEndpoint:
    """Listens from the moment it is made, so that a port that is taken is known; answers once it is told to `serve`.

    Raises:
        UsageError: the address is not this machine's, or the port is taken.
    """

    def __init__(self, host: str, port: int, access: Access) -> None:
        try:
            self._listening = listen(host, port)
        except UsageError as error:
            raise UsageError(f"metrics: {error}; see --metrics-port") from error
        self.url = f"{address(self._listening)}{PATH[1:]}"
        self._access = access
        self._close = self._listening.close

    def serve(self, registry: CollectorRegistry) -> None:
        """Answer from now on, in a daemon thread."""
        server = BackgroundServer(metrics_app(registry, self._access), self._listening, grace_s=STOP_GRACE_S)
        server.start()
        self._close = server.close

    def close(self) -> None:
        """Listen no more."""
        self._close()
