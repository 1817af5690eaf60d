"""A page to chat with the model: files of this package, which load nothing from elsewhere.

The page itself needs no key. It asks for one, keeps it in memory only, and calls /v1/chat/completions as any other
client does.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES = {"/": ("chat.html", "text/html"), "/page/chat.css": ("chat.css", "text/css"),
          "/page/chat.js": ("chat.js", "text/javascript")}
PATHS = frozenset(_FILES)
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    return [_route(path, Path(__file__).parent / name, kind) for path, (name, kind) in _FILES.items()]


def _route(path: str, file: Path, kind: str) -> Route:
    content = file.read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return Route(path, answer, methods=["GET"])
