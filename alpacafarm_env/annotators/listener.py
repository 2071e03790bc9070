"""The judge server's HTTP: connections, keep-alive, and replies that drip, hang or break off."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, cast

from .wire import HttpReply, as_error

if TYPE_CHECKING:
    from .server import JudgeServer

_MAX_BODY: Final = 64 * 1024**2
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Listener(ThreadingMixIn, TCPServer):
    """Accepts connections, each on a thread that does not keep the process alive."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], judge: JudgeServer) -> None:
        self.judge = judge
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection, remembered until it ends."""
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        """Ends one connection."""
        self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """Ends all connections that are open, so that their threads end, too."""
        for connection in list(self._open):
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints what went wrong on a connection, if it is the server's own fault."""
        if not isinstance(sys.exception(), OSError):  # a client that goes away is nobody's error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection: requests one after the other."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:  # named by the base class
        judge = cast(Listener, self.server).judge
        content = self._read_body()
        if content is None:
            return
        key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        reply = judge.reply(self.command, self.path, content, key)
        if judge.latency_s:
            judge.closing.wait(judge.latency_s)
        self._send(reply)

    do_GET = do_POST  # noqa: N815 -- named by the base class

    def _read_body(self) -> bytes | None:
        """The request's body; None if it was refused, which ends the connection, as the rest of it is still to come."""
        length = self.headers.get("Content-Length", "0" if self.command == "GET" else "")
        if length.isdecimal() and int(length) <= _MAX_BODY:
            return self.rfile.read(int(length))
        self.close_connection = True
        if length.isdecimal():
            self._send(as_error(413, f"A body of {length} bytes; expected at most {_MAX_BODY}.", "too_large"))
        else:
            self._send(as_error(411, "Expected a Content-Length; bodies in chunks are not read.", "length_required"))
        return None

    def _send(self, reply: HttpReply) -> None:
        judge = cast(Listener, self.server).judge
        if reply.manner == "hang":
            judge.closing.wait(judge.faults.hang_s)
            self.close_connection = True
            return
        lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in reply.headers]
        lines += [f"Content-Length: {len(reply.body)}", *(["Connection: close"] if self.close_connection else [])]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if reply.manner == "whole":
            self.wfile.write(head + reply.body)  # in one piece: half the system calls
        elif reply.manner == "reset":
            self.wfile.write(head + reply.body[: len(reply.body) // 2])
            self._reset()
        else:
            self._drip(head, reply.body)

    def _drip(self, head: bytes, body: bytes) -> None:
        judge = cast(Listener, self.server).judge
        self.wfile.write(head)
        for place in range(len(body)):
            self.wfile.write(body[place : place + 1])
            if judge.closing.wait(judge.faults.drip_s):
                self.close_connection = True
                return

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        # Closed for good here: the base class would say goodbye first, and the client see an orderly end.
        os.close(self.connection.detach())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the server is quiet."""
