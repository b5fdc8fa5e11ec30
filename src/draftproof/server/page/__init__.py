"""The page at `/` to try the model in a browser: the static files of this folder. They hold nothing secret or specific
to this server, so they need no key; the page asks its user for one and sends it with its requests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/answers.js": ("answers.js", "text/javascript; charset=utf-8"),
}
# Nothing from other origins, nothing inline, no framing, and no strings parsed as HTML (trusted types).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add a route for each file."""
    folder = Path(__file__).parent
    for route, (name, kind) in FILES.items():
        content = (folder / name).read_bytes()
        app.add_route(route, partial(_file, content, kind), methods=["GET", "HEAD"], include_in_schema=False)


async def _file(content: bytes, kind: str, _: Request) -> Response:
    return Response(content, media_type=kind, headers=HEADERS)
