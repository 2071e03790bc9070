"""Endpoint: addresses, keys, and that a key is found in no byte of what is written."""

import asyncio
import json
import logging
import pickle
import traceback

import pytest
from ledger_calls import attempts
from wire_server import WireServer, chat, failed, http, ok, said

from alpacafarm_env.errors import APIError, PermanentAPIError
from alpacafarm_env.llm.client import Client, ClientConfig, run
from alpacafarm_env.llm.endpoint import OPENAI, Endpoint

KEY = "sk-canary-0123456789/abcdef"
LOCAL = "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize(
    ("url", "host", "local"),
    [
        ("https://example.org/v1", "example.org", False),
        ("https://example.org:8443/v1/", "example.org:8443", False),
        ("http://localhost:8000/v1//", "localhost:8000", True),
        ("http://127.8.9.1/v1", "127.8.9.1", True),
        ("http://[::1]:80/v1", "[::1]:80", True),
        ("http://0.0.0.0:8000/v1", "0.0.0.0:8000", True),
    ],
)
def test_addresses(url, host, local):
    endpoint = Endpoint(url)
    assert (endpoint.base_url, endpoint.host, endpoint.local) == (url.rstrip("/"), host, local)
    assert repr(endpoint) == f"Endpoint({url.rstrip('/')!r})"


NO_ADDRESSES = [
    *("", "localhost:8000", "ftp://host/v1", "http://[", "https:///v1", "https://h:port/v1", "https://h/v 1"),
    *("https://u:secret@host/v1", "https://h/v1?k=secret", "https://h/v1#secret", "https://h/v1\n", "https://h\\@b"),
]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_addresses_that_are_none_or_hold_a_secret(url):
    with pytest.raises(ValueError, match="https://host/v1") as caught:
        Endpoint(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


def test_plain_http_goes_to_this_machine_only(monkeypatch):
    for unset in (None, ""):
        assert Endpoint().base_url == OPENAI
        monkeypatch.setenv("OPENAI_BASE_URL", unset or "")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{LOCAL}/ \n")
    assert Endpoint().base_url == LOCAL
    for url in ("http://example.org/v1", "http://192.168.0.2/v1", "http://localhost.example.org/v1"):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        for given in (url, None):
            with pytest.raises(ValueError, match="allow_insecure"):
                Endpoint(given)
            assert Endpoint(given, allow_insecure=True).base_url == url


def test_keys_are_read_anew_and_old_ones_hidden(monkeypatch):
    assert Endpoint(LOCAL).key() == "no-key"
    assert Endpoint(LOCAL, f" {KEY}\n").key() == KEY
    endpoint = Endpoint("https://example.org/v1")
    for now in (KEY, "sk-another-0123456789", ""):
        monkeypatch.setenv("OPENAI_API_KEY", now + "\n")
        assert not now or endpoint.key() == now
        shown = f"Bad keys: {KEY} sk-canar****cdef {now}."
        assert endpoint.redact(shown) == "Bad keys: [key] [key] " + ("[key]." if now else ".")
        assert endpoint.redact_reply(f"{KEY} {now}") == ("[key] [key]" if now else "[key] ")
    assert KEY not in str(vars(endpoint))


@pytest.mark.parametrize("key", ["", "  ", "sk-“quoted”", "sk-two\nlines", "sk-a b", 'sk-"x"', "sk-\\x", "sk-\x7f"])
def test_missing_or_broken_keys(key):
    with pytest.raises(PermanentAPIError, match="OPENAI_API_KEY") as caught:
        Endpoint("https://example.org/v1", key).key()
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    "quoted",
    [
        *(KEY, KEY.replace("/", "\\/"), KEY.replace("/", "%2F"), repr({"k": KEY}), json.dumps([KEY, KEY])),
        *("sk-canar****cdef", "sk-c...cdef", "sk-*********************f", "sk-canary…bcdef", "Bearer sk-••••"),
    ],
)
def test_messages_without_the_key(quoted):
    told = Endpoint(LOCAL, KEY).redact(f"Incorrect key: {quoted}, see the account.")
    assert "[key]" in told
    assert not any(part in told for part in ("canar", "cdef", "0123", "sk-c", "sk-*"))
    assert told.startswith("Incorrect key: ")
    assert told.endswith("see the account.")


def test_other_words_stay():
    """A reply loses the whole key alone, and none that a word may be."""
    text = "A task-based answer... with sk and **bold** words, sk-like ones. no-key is needed, sk-canar is not one"
    assert Endpoint(LOCAL, KEY).redact(text) == Endpoint(LOCAL).redact(text) == text
    assert Endpoint(LOCAL, "ollama").redact("Bad key ollama") == "Bad key [key]"
    assert Endpoint(LOCAL, "ollama").redact_reply("I run on ollama") == "I run on ollama"
    assert Endpoint(LOCAL, KEY).redact_reply(f"{KEY} sk-canar****cdef") == "[key] sk-canar****cdef"


def test_libraries_warn_without_the_key_and_log_nothing_else(caplog):
    import openai  # noqa: F401  # its loggers have to exist

    def log():
        caplog.clear()
        logging.getLogger("httpcore2.http11").debug("receive_response_headers.complete %r", [(b"x", KEY)])
        logging.getLogger("openai._base_client").debug("HTTP Response: %s", {"x-echo": KEY})
        logging.getLogger("openai").warning("A warning with %s", KEY)
        logging.getLogger("stamina").warning("stamina.retry_scheduled")
        return [record.getMessage() for record in caplog.records]

    caplog.set_level(logging.DEBUG)
    with Endpoint(LOCAL, KEY).quiet_logs():
        assert log() == ["A warning with [key]"]
    assert len(log()) == 4


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
    texts += [str(result), *map(str, attempts(ledger)), repr(endpoint), str(vars(endpoint))]
    texts += [record.getMessage() + str(vars(record)) for record in caplog.records]
    return texts + [path.read_bytes().decode("latin-1") for path in ledger.path.parent.iterdir()]


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize("fault", ECHOES)
def test_the_key_is_nowhere(fault, ledger, caplog, capfd):
    texts = written(fault, ledger, caplog)
    assert not leaks([*texts, *capfd.readouterr()])
