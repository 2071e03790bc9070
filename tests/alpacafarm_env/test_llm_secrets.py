"""The key: found in no byte of what is written."""

import asyncio
import logging
import pickle
import traceback

import pytest
from ledger_calls import attempts
from llm_asks import KEY, asked, chat
from wire_server import WireServer, failed, http, ok, said

from alpacafarm_env.errors import APIError
from alpacafarm_env.llm.client import Client, ClientConfig, run
from alpacafarm_env.llm.endpoint import Endpoint

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
    "no http": [f"HTTP/9 {KEY}\r\n\r\n".encode(), None],
    "bad header": [f"HTTP/1.1 200 OK\r\n{KEY}\r\n\r\n".encode(), None],
    "redirect": http(307, b"", location=f"http://127.0.0.1:9/{KEY}"),
    "answer": ok(f"Your key is {KEY}.", reason=f"stop {KEY}"),
}


def everything(error):
    """All that can be printed of an error: with its chain, and the values of variables in all frames."""
    seen = []
    while error is not None:
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        seen += [repr(error), str(vars(error)), *shown.format(), *traceback.format_exception(error)]
        error = error.__cause__ or error.__context__
    return seen


def leaks(texts):
    return [text for text in texts if KEY in text or CUT in text]


def written(fault, ledger, caplog):
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

    with WireServer(lambda seen, number: ECHOES[fault]) as server:
        endpoint = Endpoint(server.url, KEY)
        client = Client(endpoint, config=ClientConfig(max_attempts=2, attempt_timeout_s=0.3), ledger=ledger)
        (result,) = run(main(client))
    if isinstance(result, BaseException):
        assert isinstance(result, APIError)
        assert result.__context__ is None
        texts += everything(result)
    for hidden in (endpoint, client):
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as refused:
            pickle.dumps(hidden)
        texts.append(str(refused.value))
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert len(caplog.records) > 5
    texts += [str(result), *map(str, attempts(ledger)), repr(endpoint), str(vars(endpoint))]
    texts += [record.getMessage() + str(vars(record)) for record in caplog.records]
    return texts + [path.read_bytes().decode("latin-1") for path in ledger.path.parent.iterdir()]


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("fault", ECHOES)
def test_the_key_is_nowhere(fault, ledger, caplog, capfd):
    texts = written(fault, ledger, caplog)
    assert not leaks([*texts, *capfd.readouterr()])


def test_a_key_that_is_changed_while_its_request_is_under_way_stays_hidden(ledger, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)

    def reply(seen, number):
        monkeypatch.setenv("JUDGE_KEY", "sk-another-0123456789")
        return failed(401, f"Incorrect API key provided: {KEY} ({CUT})")

    with WireServer(reply) as server:
        (error,) = asked(Endpoint(server.url, api_key_env="JUDGE_KEY"), [chat(server.url)], ledger=ledger)
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert "[key]" in str(error)
    assert not leaks([*everything(error), str(attempts(ledger))])
