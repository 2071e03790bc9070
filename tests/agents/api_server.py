"""An OpenAI-compatible server on the loopback interface that answers as a test tells it to."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Answers POSTs with what `reply(body, attempt)` returns: a status, a body (JSON-able, or bytes), headers."""

    daemon_threads = True
    reply: Callable[[dict, int], tuple]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.paths, self.keys = [], [], []
        self.active = self.most_active = 0
        self.lock = threading.Lock()
        self.reply = lambda body, attempt: (200, echo(body))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.bodies.append(body)
            server.paths.append(self.path)
            server.keys.append(self.headers["Authorization"])
            server.active += 1
            server.most_active = max(server.most_active, server.active)
            attempt = len(server.bodies)
        status, content, *headers = server.reply(body, attempt)
        with server.lock:
            server.active -= 1
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        sent = {"Content-Type": "application/json", "Content-Length": str(len(data)), **dict(*headers)}
        try:
            self.send_response(status)
            for name, value in sent.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has given up, as some tests want it to

    def log_message(self, *args: object) -> None:
        pass


def prompt_of(body: dict) -> str:
    return body["messages"][-1]["content"] if "messages" in body else body["prompt"]


def answer(text: object, reason: str = "stop", usage: object = None, kind: str = "chat") -> dict:
    said = {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
    choice = {"index": 0, "finish_reason": reason, **said}
    return {"id": "1", "object": "x", "created": 0, "model": "m", "choices": [choice], "usage": usage}


def echo(body: dict) -> dict:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return answer(f"Re: {prompt_of(body)}", usage=usage, kind="chat" if "messages" in body else "completion")
