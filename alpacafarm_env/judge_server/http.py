"""HTTP of the judge server and the score server: connections and keep-alive."""

import errno
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, Protocol, TypeVar, cast

from ..errors import AlpacaFarmError
from ..oracles.base import shorten
from .guard import is_loopback, refusal
from .replies import HttpReply, as_error

IDLE_S: Final = 30.0
"""Seconds a connection has for its next whole request, and to take the reply to the last one."""
MOST_CONNECTIONS: Final = 512
"""Connections at once, each a thread and a file: a process may mostly open 1,024 files."""
REPORT_S: Final = 60.0
"""Seconds between two lines of a server's log."""
MAX_BODY: Final = 64 * 1024**2
_MOST_DIGITS: Final = 20
"""Of a Content-Length: int() refuses thousands."""
_CROWDED: Final = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Listener(ThreadingMixIn, TCPServer):
    """Accepts connections, each on a thread that does not keep the process alive.

    A connection without a whole request within `IDLE_S` is ended, however slowly its bytes drip. Beyond
    `MOST_CONNECTIONS` the one that has waited longest makes room; one whose request is being answered is never ended.

    `reply` answers a request's method, path, body and key. Other arguments, and errors, as in `JudgeServer`.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(
        self,
        address: tuple[str, int],
        reply: Callable[[str, str, bytes, str], HttpReply],
        *,
        latency_s: float,
        allow_remote: bool,
    ) -> None:
        self.reply, self.latency_s, self.allow_remote = reply, latency_s, allow_remote
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._waiting: dict[socket.socket, float] = {}  # since when, the longest first
        self.address_family, found, self.remote = resolve(*address, allow_remote=allow_remote)
        super().__init__(found, _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """The address for clients, "http://127.0.0.1:PORT"."""
        return url_of(self.server_address)

    def start(self) -> None:
        """Accepts connections, on a thread of its own."""
        self._thread.start()

    def stop(self, grace_s: float = 0.0) -> None:
        """Takes no more connections, and ends those that are open; requests being answered have `grace_s` seconds."""
        if self.closing.is_set():
            return
        self.closing.set()
        self.shutdown()
        self.server_close()
        if grace_s:
            self.end_connections(socket.SHUT_RD)  # each ends by itself, once it has sent its answer
            until = time.monotonic() + grace_s
            while self._open and time.monotonic() < until:
                time.sleep(0.01)
        self.end_connections()
        self._thread.join()

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection, remembered until it ends."""
        connection, address = super().get_request()
        self._open.add(connection)
        self.awaits(connection)
        return connection, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for a connection, if need be in place of the one that has waited longest."""
        if len(self._open) <= MOST_CONNECTIONS or self._end_longest(request):
            return True
        with suppress(OSError):
            request.send(_CROWDED)
        return False

    def service_actions(self) -> None:
        """Ends the connections that have waited too long; called by the loop that accepts connections."""
        super().service_actions()
        while self._end_longest(since=time.monotonic() - IDLE_S):
            pass

    def awaits(self, connection: socket.socket) -> None:
        """A connection's next request is due from now on."""
        with self._lock:
            self._waiting.pop(connection, None)
            if connection in self._open:
                self._waiting[connection] = time.monotonic()

    def answers(self, connection: socket.socket) -> None:
        """A connection's request has come in full: the answer may take its time."""
        with self._lock:
            self._waiting.pop(connection, None)

    def _end_longest(self, but: socket.socket | None = None, *, since: float = math.inf) -> bool:
        """Ends the connection that has waited longest, if it has since that time."""
        with self._lock:
            found = next(iter(self._waiting), None)
            if found is None or found is but or self._waiting[found] > since:
                return False
            del self._waiting[found]
        _end(found)
        return True

    def shutdown_request(self, request: Any) -> None:
        """Ends one connection."""
        self._open.discard(request)
        self.answers(request)
        super().shutdown_request(request)

    def end_connections(self, how: int = socket.SHUT_RDWR) -> None:
        """Ends all connections that are open, so that their threads end, too; or only their `how`, such as reading."""
        for connection in list(self._open):
            _end(connection, how)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints what went wrong on a connection, if it is the server's own fault."""
        if not isinstance(sys.exception(), OSError):  # a client that goes away is nobody's error
            super().handle_error(request, client_address)


def _end(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with suppress(OSError):  # it has ended by itself
        connection.shutdown(how)  # which ends its thread, too


def resolve(host: str, port: int, *, allow_remote: bool) -> tuple[socket.AddressFamily, Any, bool]:
    """The address behind a host's name, IPv4 where there are both, and whether other machines can reach it.

    Raises:
        AlpacaFarmError: They can, and that was not allowed.
        OSError: There is no such host.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    remote = not is_loopback(str(address[0]))
    if remote and not allow_remote:
        raise AlpacaFarmError(
            f"expected a host that only this machine can reach, such as 127.0.0.1 or ::1, got {host!r}. There is no "
            "encryption: on a network that you trust, allow_remote=True, --allow-remote on the command line, takes it "
            "as it is."
        )
    return family, address, remote


def url_of(address: tuple[Any, ...]) -> str:
    """A socket's address for clients, "http://127.0.0.1:PORT"."""
    host, port = str(address[0]), address[1]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Handler(BaseHTTPRequestHandler):
    """One connection: requests one after the other."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:  # named by the base class
        listener = cast(Listener, self.server)
        content = self._read_body()
        if content is None:
            return
        listener.answers(self.connection)
        key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        sender = self.headers.get("Host"), self.headers.get("Origin")
        reply = refusal(*sender, allow_remote=listener.allow_remote)
        reply = reply or listener.reply(self.command, self.path, content, key)
        if listener.latency_s:
            listener.closing.wait(listener.latency_s)
        listener.awaits(self.connection)
        self._send(reply)
        listener.awaits(self.connection)

    do_GET = do_POST  # noqa: N815 -- named by the base class

    def _read_body(self) -> bytes | None:
        """The request's body; None if it was refused, which ends the connection, as its rest is still to come."""
        length = self.headers.get("Content-Length", "0" if self.command == "GET" else "")
        number = int(length) if length.isdecimal() and len(length) <= _MOST_DIGITS else -1
        if 0 <= number <= MAX_BODY:
            return self.rfile.read(number)
        self.close_connection = True
        if number > MAX_BODY:
            self._send(as_error(413, f"A body of {length} bytes; expected at most {MAX_BODY}.", "too_large"))
        elif length:
            text = f"Content-Length: expected a number of bytes, got {shorten(length)}."
            self._send(as_error(400, text, "invalid_request_error"))
        else:
            self._send(as_error(411, "Expected a Content-Length; bodies in chunks are not read.", "length_required"))
        return None

    def _send(self, reply: HttpReply) -> None:
        self.wfile.write(self._head(reply) + reply.body)  # in one piece: half the system calls

    def _head(self, reply: HttpReply) -> bytes:
        lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in reply.headers]
        lines += [f"Content-Length: {len(reply.body)}", *(["Connection: close"] if self.close_connection else [])]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the server is quiet."""


class Server(Protocol):
    """A server that `serve` keeps running."""

    @property
    def remote(self) -> bool:
        """Whether other machines can reach it."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *_: object) -> None: ...


S = TypeVar("S", bound=Server)


def serve(
    start: Callable[[], S],
    address: Callable[[S], str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    report: Callable[[S], str] | None = None,
) -> int:
    """Starts a server and prints its address, and a warning if other machines can reach it.

    Every `REPORT_S` seconds it prints what `report` says, on stderr. Returns 0 at Ctrl-C, or when the process is asked
    to end (SIGTERM). AlpacaFarmError if the host or port cannot be had.
    """
    try:
        server = start()
    except OSError as error:
        reason = str(error.strerror or error).rstrip(".")
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        text = f"Cannot listen on --host {host}, --port {port}: {reason}. Give another {option}."
        raise AlpacaFarmError(text) from error
    with server, suppress(KeyboardInterrupt):
        if server.remote:
            told = f"warning: other machines can reach {address(server)}; what is asked is not encrypted"
            print(told, file=sys.stderr, flush=True)  # noqa: T201 -- for whoever starts it
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            print(address(server), flush=True)  # noqa: T201 -- this is what a caller waits for
            _wait(None if report is None else lambda: report(server))
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0


def _wait(report: Callable[[], str] | None) -> None:
    due = time.monotonic() + REPORT_S
    while True:  # a wait without an end is not always woken by a signal that another thread of ours has taken
        time.sleep(0.1)
        if report is not None and time.monotonic() >= due:
            due += REPORT_S
            print(f"{time.strftime('%H:%M:%S')} {report()}", file=sys.stderr, flush=True)  # noqa: T201 -- the log
