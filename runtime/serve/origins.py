"""Who may ask through a browser: web sites that are not ours must not use a server that their visitors can reach.

A browser tells which site's page asks (Origin), and by which name it found the server (Host). A site can have its own
name resolve to this machine (DNS rebinding): then both are the site's.
"""

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mosaic.runtime.serve.errors import ApiError

ANY = "*"


class Origins:
    """Refuses what a strange site's page asks: 403.

    `origins`: sites that may ask, ANY for all. `hosts`: names of the server beside localhost and addresses; None: any.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], hosts: Sequence[str] | None) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = None if hosts is None else frozenset(map(str.lower, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        app: ASGIApp = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host", "").lower(), headers.get("origin")
            if host and self._hosts is not None and not _own(host, self._hosts):
                remedy = "use localhost or an address, start the server with this --host, or with --api-key"
                app = _forbidden(f"this server is not known by the name {host!a}: {remedy}")
            elif scope["method"] == "POST" and origin is not None and not self._may_ask(origin, host):
                remedy = "start the server with it as --cors-origin"
                app = _forbidden(f"the web site {origin!a} may not use this server: {remedy}")
        await app(scope, receive, send)

    def _may_ask(self, origin: str, host: str) -> bool:
        return bool(self._origins & {ANY, origin}) or origin.lower().partition("://")[2] == host


def is_loopback(address: str) -> bool:
    """Whether nothing but this machine reaches an IP address."""
    return ip_address(address).is_loopback


def _own(host: str, hosts: frozenset[str]) -> bool:
    """Whether no site can have made up this name: any of `hosts`, localhost, an address. The port may be any."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if name in hosts or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _forbidden(problem: str) -> ASGIApp:
    return ApiError(403, problem, code="forbidden").response()
