"""The web application of the page: routes, limits and headers.

Its requests read no file and change nothing; all that they need is in them. A page of another site
can neither read its answers nor send it files: the Host header has to name this machine, and
requests of other origins are refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.draw.viewer import viewer_script
from penstock.errors import MissingExtra
from penstock.explore import answers
from penstock.files.text import MAX_BYTES

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

#: The browser may load nothing from anywhere else. Drawings set styles of their elements.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' "
    "data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LOOPBACK_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")

Handler = Callable[["Request"], Awaitable["Response"]]


def make_app(hosts: Sequence[str] | None = LOOPBACK_HOSTS) -> Starlette:
    """Return the application.

    Args:
        hosts: accepted names in the Host header, without port; None accepts all, for a server that
            other machines may reach.

    Raises:
        MissingExtra: Starlette or Jinja2 is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtra("starlette", "explore", "penstock explore") from error
    answers.templates()
    protect = partial(_protected, hosts=hosts)
    routes = [
        Route("/", protect(_page), methods=["GET"]),
        Route("/evaluate", protect(_evaluate), methods=["GET"]),
        Route("/more", protect(_more), methods=["GET"]),
        Route("/upload", protect(_upload), methods=["POST"]),
        Route("/static/{name}", protect(_static), methods=["GET"]),
    ]
    return Starlette(routes=routes)


def _protected(handler: Handler, hosts: Sequence[str] | None) -> Handler:
    """Wrap a handler so that it answers to pages of this server only."""

    async def answer(request: Request) -> Response:
        """Answer a request, unless a page of another site has sent it."""
        from starlette.responses import PlainTextResponse

        problem = _foreign(request, hosts)
        if problem:
            return PlainTextResponse(problem, 403, headers=_HEADERS)
        response = await handler(request)
        response.headers.update(_HEADERS)
        return response

    return answer


def _foreign(request: Request, hosts: Sequence[str] | None) -> str:
    """Return why a request does not come from a page of this server; empty if it does."""
    host = request.headers.get("host", "")
    # An IPv6 address without a port ends in a bracket.
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    # A foreign name that resolves to this machine (DNS rebinding) would make its pages same-origin.
    if hosts is not None and name.lower() not in hosts:
        return "this server answers to its own address only: open the address that it printed"
    origin = request.headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return "requests of pages of other sites are refused"
    # Links on other sites may open the page itself.
    if request.headers.get("sec-fetch-site") == "cross-site" and request.url.path != "/":
        return "requests of pages of other sites are refused"
    return ""


async def _in_thread(function: Callable[..., object], *arguments: object) -> object:
    """Run a computation outside of the event loop, so that other requests are answered."""
    from starlette.concurrency import run_in_threadpool

    return await run_in_threadpool(function, *arguments)


async def _page(request: Request) -> Response:
    """Answer with the page of a state."""
    from starlette.responses import HTMLResponse

    return HTMLResponse(str(await _in_thread(answers.page, request.url.query)))


async def _evaluate(request: Request) -> Response:
    """Answer with the figures and the timelines of a state."""
    from starlette.responses import JSONResponse

    return JSONResponse(await _in_thread(answers.evaluation, request.url.query))


async def _more(request: Request) -> Response:
    """Answer with steady state and sweep of a state."""
    from starlette.responses import JSONResponse

    return JSONResponse(await _in_thread(answers.more, request.url.query))


async def _upload(request: Request) -> Response:
    """Answer with the state that files make."""
    from starlette.responses import JSONResponse

    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            problem = f"the files are longer than {MAX_BYTES:,} bytes, which no profile or plan is"
            return JSONResponse({"problem": problem}, 413)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        return JSONResponse({"problem": "the files are not UTF-8 text"})
    return JSONResponse(await _in_thread(answers.upload, request.url.query, text))


async def _static(request: Request) -> Response:
    """Answer with the style sheet or a script."""
    from importlib.resources import files

    from starlette.responses import PlainTextResponse, Response

    name = request.path_params["name"]
    if name == "explore.css":
        return Response(answers.style_sheet(), media_type="text/css")
    if name == "viewer.js":
        return Response(viewer_script(), media_type="text/javascript")
    if name == "explore.js":
        script = files("penstock.explore").joinpath("static", "explore.js")
        return Response(script.read_text(encoding="utf-8"), media_type="text/javascript")
    return PlainTextResponse("there is no such file", 404)
