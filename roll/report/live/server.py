"""A page that follows a run, served to browsers of this machine which know a token."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(eq=False)
class LivePage:
    """A page that is made anew when there is something new, and only then."""

    version: Callable[[], str]
    """Function that returns a text which changes with what the page shows."""
    make: Callable[[str], str]
    """Function that returns the HTML of a version."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: tuple[str, str] = ("", "")
    """Version of the page that was made last, and its HTML."""

    def html(self) -> str:
        """Return the newest page."""
        with self._lock:
            version = self.version()
            if version != self._made[0]:
                self._made = version, self.make(version)
            return self._made[1]


class PageServer:
    """HTTP server of one page, on the loopback interface only; a context manager, inside whose
    block it answers.

    Answers have code 403 unless the address has the token, and the host that the browser names is
    this machine: else a page of a stranger could ask under a name of its own that points here.
    """

    def __init__(self, page: LivePage, *, port: int = 0) -> None:
        """Listen.

        Args:
            port: port to listen at; 0: any free one.

        Raises:
            OSError: the port is in use.
        """
        self._token = secrets.token_urlsafe(24)
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(page, self._token))
        self._http.daemon_threads = True
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="roll-watch-page", daemon=True
        )

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://127.0.0.1:{self._http.server_port}/?token={self._token}"

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _is_this_machine(host: str) -> bool:
    """Return whether a browser that names `host`, with or without a port, means this machine."""
    try:
        return urlsplit(f"//{host}").hostname in ("127.0.0.1", "localhost")
    except ValueError:
        return False


def _handler(page: LivePage, token: str) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests for `page`."""

    class Handler(BaseHTTPRequestHandler):
        """Answers `/`, the page, and `/version`, the version of what it would show."""

        timeout = 30.0

        def do_GET(self) -> None:
            """Answer a request."""
            address = urlsplit(self.path)
            given = parse_qs(address.query).get("token", [""])[0]
            known = secrets.compare_digest(given.encode(), token.encode())
            if not known or not _is_this_machine(self.headers.get("Host", "")):
                self._answer(
                    HTTPStatus.FORBIDDEN, "open the address that roll watch printed", "plain"
                )
            elif address.path == "/version":
                self._answer(HTTPStatus.OK, page.version(), "plain")
            elif address.path == "/":
                self._answer(HTTPStatus.OK, page.html(), "html")
            else:
                self._answer(HTTPStatus.NOT_FOUND, "there is only /", "plain")

        def _answer(self, status: HTTPStatus, text: str, kind: str) -> None:
            """Send an answer."""
            body = text.encode()
            with suppress(ConnectionError, TimeoutError):  # the browser waits no more
                self.send_response(status)
                self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                for name, value in HEADERS.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: the terminal belongs to the screen."""

    return Handler
