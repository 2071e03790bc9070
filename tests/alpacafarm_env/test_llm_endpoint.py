"""Addresses, and keys that no written byte holds; bodies read up to a limit, connections, `run` anywhere."""

import asyncio
import gzip
import json
import logging
import pickle
import signal
import threading
import time
import traceback
import tracemalloc
import zlib
from functools import cache

import pytest
from faulty_server import WireServer, ask, asked, chat, failed, first, http, ok, said
from ledger_calls import attempts

from alpacafarm_env.errors import APIError, PermanentAPIError, TransientAPIError
from alpacafarm_env.llm.client import Client, ClientConfig, run
from alpacafarm_env.llm.endpoint import OPENAI, Endpoint
from alpacafarm_env.llm.transport import LONGEST_REPLY

KEY = "sk-canary-0123456789/abcdef"
LOCAL = "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize(
    ("url", "host", "local"),
    [
        ("https://example.org/v1", "example.org", False),
        ("http://localhost:8000/v1//", "localhost:8000", True),
        ("http://[::1]:80/v1", "[::1]:80", True),
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
    caplog.set_level(logging.DEBUG)
    with Endpoint(LOCAL, KEY).quiet_logs():
        logging.getLogger("httpcore2.http11").debug("headers %r", [(b"x", KEY)])
        logging.getLogger("openai").warning("A warning with %s", KEY)
        logging.getLogger("stamina").warning("stamina.retry_scheduled")
    assert [record.getMessage() for record in caplog.records] == ["A warning with [key]"]


CUT = f"{KEY[:8]}****{KEY[-4:]}"
ECHOES = {
    "401": failed(401, f"Incorrect API key provided: {KEY} ({CUT})"),
    "headers": failed(403, "no", x_echo=f"Bearer {KEY}", www_authenticate=KEY, x_request_id=KEY),
    "reason": http(404, {"error": KEY}, reason=f"Not {KEY}"),
    "429 with a name": failed(429, KEY, retry_after=KEY),
    "error in 200": http(200, {"error": KEY}),
    "text that is a list": http(200, said([KEY])),
    "cut json": http(200, f'{{"choices": "{KEY}'.encode()),
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


pytestmark = pytest.mark.usefixtures("short_waits")
HEAD = b"HTTP/1.1 %d Said\r\ncontent-type: application/json\r\n%s\r\n"


def endless(status=200, piece=b" " * 2**16):
    yield HEAD % (status, b"") + b'{"choices": ['
    for _ in range(100 * 2**20 // len(piece)):  # a client without a limit ends, too
        yield piece


@cache
def bomb(*encodings):
    """Blanks, compressed as often as there are encodings."""
    packer = zlib.compressobj(level=1, wbits=31)
    body = b"".join(packer.compress(b" " * 2**20) for _ in range(100)) + packer.flush()
    for _ in encodings[1:]:
        body = gzip.compress(body)
    return http(200, body, content_encoding=", ".join(encodings))


@pytest.mark.parametrize("response", [endless, lambda: bomb("gzip"), lambda: bomb("gzip", "gzip")])
def test_an_endless_body_is_not_read_on(response):
    with WireServer(lambda seen, number: response()) as server:
        first(server, config={"max_attempts": 1})  # imports what it needs
        tracemalloc.start()
        try:
            error = first(server, config={"max_attempts": 1, "attempt_timeout_s": 20.0})
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert isinstance(error, TransientAPIError)
    assert most < 75 * 2**20


def test_a_reply_too_long_counts_at_its_reserve(ledger):
    def reply(seen, number):
        return endless() if seen.body["messages"][0]["content"] == "Question 1?" else ok()

    with WireServer(reply) as server:
        answers, _ = ask(server, 3, ledger=ledger, config={"max_attempts": 2})
    assert [hasattr(answer, "raw") for answer in answers] == [True, False, True]
    assert isinstance(answers[1], TransientAPIError)
    told = [row.state for row in attempts(ledger) if row.error and f"{LONGEST_REPLY:,}" in row.error]
    assert told == ["unknown"] * 2


@pytest.mark.parametrize("response", [lambda: endless(401), lambda: http(401, b"none", content_encoding="br")])
def test_an_endless_error_is_known_by_its_status(response):
    with WireServer(lambda seen, number: response()) as server:
        assert isinstance(first(server), PermanentAPIError)
    assert len(server.seen) == 1


def test_the_longest_reply_is_read_compressed_or_not():
    body = json.dumps(said("x" * 1000)).encode()
    with WireServer(lambda seen, number: http(200, body + b" " * (LONGEST_REPLY - len(body)))) as server:
        assert first(server).reply.text == "x" * 1000
    for encoding, pack in {"gzip": gzip.compress, "deflate": zlib.compress}.items():
        with WireServer(lambda *_, e=encoding, p=pack: http(200, p(body), content_encoding=e)) as server:
            assert first(server).reply.text == "x" * 1000
        assert encoding in server.seen[0].headers["accept-encoding"]


def test_the_proxy_is_for_other_machines_alone(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with WireServer() as proxy, WireServer(lambda seen, n: ok("Local.")) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        assert first(server).reply.text == "Local."
        assert not proxy.seen
        endpoint = Endpoint("http://judge.example/v1", KEY, allow_insecure=True)
        assert asked(endpoint, [chat(endpoint.base_url)])[0].reply.text == "Yes."
    assert len(proxy.seen) == len(server.seen) == 1


@pytest.mark.parametrize(("variable", "value"), [("SSL_CERT_FILE", "/no/such.pem"), ("ALL_PROXY", "ftp://p.example")])
def test_variables_that_allow_no_connection_are_named(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    endpoint = Endpoint("https://judge.example/v1", KEY)
    (error,) = asked(endpoint, [chat(endpoint.base_url)])
    assert isinstance(error, PermanentAPIError)
    assert variable in str(error)


def notebook(call):
    """From a function that a running loop calls."""

    async def cell():
        return call()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


@pytest.mark.parametrize("place", [lambda call: call(), notebook], ids=["plain", "notebook"])
def test_results_and_errors(place):
    async def work(value):
        await asyncio.sleep(0.001)
        return 42 // value

    assert place(lambda: run(work(2))) == 21
    with pytest.raises(ZeroDivisionError) as caught:
        place(lambda: run(work(0)))
    assert caught.value.__context__ is caught.value.__cause__ is None


@pytest.mark.parametrize("place", [lambda call: call(), notebook], ids=["plain", "notebook"])
def test_interrupt_cancels_cleanly(place):
    cleaned = []

    async def sleeper():
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        try:
            await asyncio.sleep(20)
        finally:
            await asyncio.sleep(0.01)  # such as closing connections
            cleaned.append(True)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        place(lambda: run(sleeper()))
    assert cleaned == [True]
    assert time.monotonic() - start < 5
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]
