"""The key: found in no byte of what is written, and sent to no other server."""

import asyncio
import logging
import pickle
import re
import traceback
from pathlib import Path

import pytest
from api_asks import KEY, chat
from ledger_reads import attempts
from wire_server import WireServer, failed, http, ok, said

from alpacafarm_env.errors import APIError, PermanentAPIError
from alpacafarm_env.llm import client as client_module
from alpacafarm_env.llm.client import Client, ClientConfig
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.ledger.store import Ledger
from alpacafarm_env.llm.run_sync import run
from alpacafarm_env.llm.transport import Sender

CUT = f"{KEY[:8]}****{KEY[-4:]}"

ECHOES = {
    "401": failed(401, f"Incorrect API key provided: {KEY} ({CUT})"),
    "400": failed(400, f"Bad header: Bearer {KEY}"),
    "headers": failed(403, "no", x_echo=f"Bearer {KEY}", www_authenticate=KEY, x_request_id=KEY),
    "reason": http(404, {"error": KEY}, reason=f"Not {KEY}"),
    "500 with a page": http(500, f"<html>{KEY}</html>".encode(), content_type="text/html"),
    "429 with a name": failed(429, KEY, retry_after=KEY),
    "error in 200": http(200, {"error": KEY}),
    "text that is a list": http(200, said([KEY])),
    "cut json": http(200, f'{{"choices": "{KEY}'.encode()),
    "no http": f"HTTP/9 {KEY}\r\n\r\n".encode(),
    "bad header": f"HTTP/1.1 200 OK\r\n{KEY}\r\n\r\n".encode(),
    "redirect": http(307, b"", location=f"http://127.0.0.1:9/{KEY}"),
    "answer": ok(f"Your key is {KEY}.", reason=f"stop {KEY}"),
    "hang": [b"HTTP/1.1 200 OK\r\n", 30.0],
}


class Exposing(Endpoint):
    """The twin: shows what it is given."""

    def redact(self, text):
        return text

    redact_reply = redact


def everything(error):
    """All that can be printed of an error: with its chain, and the values of variables in all frames."""
    seen = []
    while error is not None:
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        seen += [repr(error), str(vars(error)), *shown.format(), *traceback.format_exception(error)]
        error = error.__cause__ or error.__context__
    return seen


def written(fault, endpoint_class, tmp_path, caplog):
    """Everything that a client writes while a server quotes its key."""
    caplog.set_level(logging.DEBUG)
    for name in ("openai", "httpx", "httpx2", "httpcore2", "httpcore2.http11", "asyncio", "stamina"):
        caplog.set_level(logging.DEBUG, name)
    texts = []

    async def main(client):
        async with client:
            results = await asyncio.gather(client.ask(chat(server.url), questions=["q"]), return_exceptions=True)
            texts.extend([str(vars(client)), repr(client)])
            return results

    with WireServer(lambda seen, number: ECHOES[fault]) as server, Ledger(tmp_path / "ledger.sqlite") as ledger:
        endpoint = endpoint_class(server.url, KEY)
        client = Client(endpoint, config=ClientConfig(max_attempts=2, attempt_timeout_s=0.5), ledger=ledger)
        (result,) = run(main(client))
        if isinstance(result, BaseException):
            assert isinstance(result, APIError)
            texts += everything(result)
            assert result.__context__ is None
        else:
            texts.append(str(result))
        for hidden in (endpoint, client):
            with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as refused:
                pickle.dumps(hidden)
            texts.append(str(refused.value))
        texts += map(str, ledger.do(attempts).result())
        texts += [repr(endpoint), str(vars(endpoint))]
        assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert len(caplog.records) > 5
    texts += [record.getMessage() + str(vars(record)) for record in caplog.records]
    texts += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    return texts


def leaks(texts):
    # The server's own bytes in this process (its thread's variables) are not what the client writes.
    return [text for text in texts if KEY in text or CUT in text]


@pytest.mark.parametrize("fault", ECHOES)
def test_the_key_is_nowhere(fault, tmp_path, caplog, capfd):
    texts = written(fault, Endpoint, tmp_path, caplog)
    assert not leaks([*texts, *capfd.readouterr()])


def test_twin_that_does_not_redact_is_found_out(tmp_path, caplog, capfd):
    found = {}
    for fault in ("401", "headers", "answer"):
        caplog.clear()
        (tmp_path / fault).mkdir()
        found[fault] = len(leaks([*written(fault, Exposing, tmp_path / fault, caplog), *capfd.readouterr()]))
    assert all(found.values()), found


def test_a_key_that_is_changed_while_its_request_is_under_way_stays_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def reply(seen, number):
        monkeypatch.setenv("JUDGE_KEY", "sk-another-0123456789")
        return failed(401, f"Incorrect API key provided: {KEY} ({CUT})")

    async def main():
        async with Client(Endpoint(server.url, api_key_env="JUDGE_KEY"), ledger=ledger) as client:
            return await asyncio.gather(client.ask(chat(server.url)), return_exceptions=True)

    with WireServer(reply) as server, Ledger(tmp_path / "ledger.sqlite") as ledger:
        (error,) = run(main())
        rows = ledger.do(attempts).result()
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert "[key]" in str(error)
    assert not leaks([*everything(error), str(rows)])


# ------------------------------------------------------------------------------------------------ redirects


def visits(status, client_class=Client):
    """What a second server sees of requests that the first one sends on to it."""
    with WireServer() as other:
        where = other.url.replace("127.0.0.1", "localhost")
        with WireServer(lambda seen, number: http(status, b"", location=f"{where}/chat/completions")) as server:

            async def main():
                async with client_class(Endpoint(server.url, KEY)) as client:
                    return await asyncio.gather(client.ask(chat(server.url)), return_exceptions=True)

            (result,) = run(main())
    return result, other.seen


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_to_another_host_are_not_followed(status):
    result, seen = visits(status)
    assert seen == []
    assert "base_url" in str(result)


def test_twin_that_follows_reaches_the_other_host(monkeypatch):
    class Following(Sender):
        def _connection(self):
            http = super()._connection()
            http.follow_redirects = True
            return http

    monkeypatch.setattr("alpacafarm_env.llm.client.Sender", Following)
    _, seen = visits(307, Client)
    assert len(seen) == 1  # with the texts, if not with the key


def test_local_servers_are_asked_without_the_proxy(monkeypatch):
    with WireServer(lambda seen, number: failed(502)) as proxy, WireServer() as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))

        async def main():
            async with Client(Endpoint(server.url, KEY)) as client:
                return await client.ask(chat(server.url))

        assert run(main()).reply.text == "Yes."
    assert not proxy.seen


def test_other_machines_are_asked_through_the_proxy(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with WireServer() as proxy:
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        endpoint = Endpoint("http://judge.example/v1", KEY, allow_insecure=True)

        async def main():
            async with Client(endpoint) as client:
                return await client.ask(chat(endpoint.base_url))

        assert run(main()).reply.text == "Yes."
    assert len(proxy.seen) == 1


@pytest.mark.parametrize(
    ("variable", "value", "cause"),
    [
        ("SSL_CERT_FILE", "/no/such/file.pem", "FileNotFoundError"),
        ("ALL_PROXY", "ftp://proxy.example", "Unknown scheme for proxy"),
    ],
)
def test_variables_that_allow_no_connection_are_named(monkeypatch, variable, value, cause):
    monkeypatch.setenv(variable, value)
    endpoint = Endpoint("https://judge.example/v1", KEY)

    async def main():
        async with Client(endpoint) as client:
            return await client.ask(chat(endpoint.base_url))

    with pytest.raises(PermanentAPIError, match=f"{cause}.*{variable}"):
        run(main())


def test_the_sources_know_neither_http_library():
    """openai 2 is built on httpx, openai 3 on httpx2: what openai itself exposes works with both."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in Path(client_module.__file__).parent.glob("*.py")}
    assert "client.py" in sources
    assert not [name for name, text in sources.items() if re.search(r"import httpx|from httpx", text)]
