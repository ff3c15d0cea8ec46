"""Who may look: on a loopback address anyone on this machine whose browser asked for it by name; elsewhere only with the token."""

from __future__ import annotations

import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "headrace_token"
SAFETY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""Headers of every answer: the page may load nothing from anywhere else, and its address (which may hold the token) is told to no one."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware. With a token every request must show it: as a bearer token, in the query once (then a cookie keeps it).

    Without one, the Host header must name a loopback address, so that no foreign web page can read this one through
    a name of its own that resolves here.
    """

    def __init__(self, app: ASGIApp, token: str = "") -> None:
        self.app = app
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_safety(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in SAFETY.items()),
                ]
            await send(message)

        answer = self._answer(scope)
        await (answer or self.app)(scope, receive, with_safety)

    def _answer(self, scope: Scope) -> Response | None:
        """A refusal or a redirect; None to pass the request on."""
        headers = Headers(scope=scope)
        if not self.token:
            if is_loopback(urlsplit(f"//{headers.get('host', '')}").hostname or ""):
                return None
            return PlainTextResponse("ask for localhost, or start the monitor with a token\n", 421)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if self._is_token(query.pop("token", [""])[0]):
            answer = RedirectResponse(
                scope["path"] + ("?" + urlencode(query, doseq=True) if query else ""), 303
            )
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(_cookie(headers.get("cookie", ""))):
            return None
        return PlainTextResponse("add ?token=... as printed by headrace monitor\n", 401)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())


def _cookie(header: str) -> str:
    try:
        morsel = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel is not None else ""
