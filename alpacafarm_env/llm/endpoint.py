"""Where a served model is, and the key to it: checked once, sent to that address alone, and shown nowhere."""

import ipaddress
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Self
from urllib.parse import quote, urlsplit

from ..errors import PermanentAPIError, PoolError

OPENAI = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
NO_KEY = "no-key"
HIDDEN = "[key]"
_ADDRESS = "base_url must look like https://host/v1, with no user, password, query or fragment in it"
_SHORTEST_SECRET = 12
"""A shorter key ("ollama") may be in a model's answer by chance, so that answers are not searched for it."""
_LIBRARIES = ("openai", "httpx", "httpcore", "httpx2", "httpcore2", "stamina")
_PARTS = ("connection", "http11", "http2", "proxy", "socks")
_LOGGERS = (*_LIBRARIES, *(f"httpcore{version}.{part}" for version in ("", "2") for part in _PARTS))


def require_key_variable(name: str, option: str = "api_key_env") -> None:
    """Check that the environment variable a user named is set; the default one need not be, for a local server.

    Raises:
        PoolError: It is not.
    """
    if name != OPENAI_KEY and not os.environ.get(name, "").strip():
        raise PoolError(
            f"{option}: expected the name of an environment variable that holds a key, got one that is not set. (Its "
            "name is not printed, in case it is the key itself.)"
        )


class Endpoint:
    """An OpenAI-compatible server's address and key.

    The key is not in `vars()`, the repr, a pickle (refused) or a message. Nor are the keys it had before: requests
    that carry an older one may still be under way.

    Args:
        base_url: The address up to "/v1"; None: $OPENAI_BASE_URL, or OpenAI's own.
        api_key: The key; None: read from `api_key_env` whenever a client opens its first connection. A server on this
            machine needs none.
        api_key_env: The environment variable that holds the key.
        allow_insecure: Accept http:// to another machine. Anybody on the way can then read the key and the texts.

    Attributes:
        host: The address's host, with the port if given.
        local: Whether the host is this machine.

    Raises:
        ValueError: `base_url` is no address, holds a user, a password or a query, or is http:// to another machine.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        api_key_env: str = OPENAI_KEY,
        allow_insecure: bool = False,
    ) -> None:
        if base_url is None:
            base_url = os.environ.get("OPENAI_BASE_URL", "").strip() or OPENAI
        self.base_url, self.host, self.local = _check(base_url, allow_insecure)
        self.api_key_env = api_key_env
        keys: set[str] = set()

        def find() -> tuple[str, set[str]]:
            key = (api_key or os.environ.get(api_key_env, "")).strip() or (NO_KEY if self.local else "")
            keys.add(key)
            return key, keys - {"", NO_KEY}

        self._find = find  # a function, because vars() does not show what it returns

    def key(self) -> str:
        """The key as it is now.

        Raises:
            PermanentAPIError: There is none, or it holds characters that no key has.
        """
        key, _ = self._find()
        if re.fullmatch(r"[!#-\[\]-~]+", key):  # printable ASCII without blanks, quotes and backslashes
            return key
        what = "has a key with characters that no key has" if key else "has no key"
        del key  # a traceback may show the values of variables
        raise PermanentAPIError(
            f"The server {self.host} {what}. Put it into the environment variable {self.api_key_env} "
            f'("{NO_KEY}" if the server needs none), or name another variable (api_key_env=, --api-key-env).'
        )

    def redact(self, text: str) -> str:
        """A message without the key: whole, as JSON or a URL writes it, or with its middle masked."""
        _, keys = self._find()
        for form in _forms(keys):
            text = text.replace(form, HIDDEN)
        for key in keys:
            if len(key) >= _SHORTEST_SECRET:
                # Servers quote a wrong key as "sk-ab****wxyz".
                cut = rf"{re.escape(key[:3])}[^\s\"'*•…]*?(?:[*•…]|\.{{3,}})[^\s\"']*"
                text = re.sub(cut, HIDDEN, text)
        return text

    def redact_reply(self, raw: str) -> str:
        """A model's reply without the key, which a hostile or careless server may have put there."""
        for form in _forms(key for key in self._find()[1] if len(key) >= _SHORTEST_SECRET):
            raw = raw.replace(form, HIDDEN)
        return raw

    @contextmanager
    def quiet_logs(self) -> Iterator[None]:
        """Keep the key out of what the HTTP libraries log: at DEBUG they log every header that a server sends.

        Only their warnings come through, but none of stamina's: for a served model repeats are normal.
        """
        names = {*_LOGGERS, *list(logging.root.manager.loggerDict)}  # at once: other threads may be importing
        loggers = [logging.getLogger(name) for name in names if name.split(".")[0] in _LIBRARIES]

        def redacted(record: logging.LogRecord) -> bool:
            record.msg, record.args, record.exc_info = self.redact(record.getMessage()), (), None
            return record.levelno >= logging.WARNING and record.name != "stamina"

        for logger in loggers:
            logger.addFilter(redacted)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(redacted)

    def __repr__(self) -> str:
        return f"Endpoint({self.base_url!r})"

    def __deepcopy__(self, memo: object) -> Self:
        return self  # immutable

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self!r} is not pickled, as it may hold a key. Make one where it is used.")


def _check(base_url: str, allow_insecure: bool) -> tuple[str, str, bool]:
    """The normalised address, its host with the port, and whether that is this machine."""
    parts = None
    with suppress(ValueError, AttributeError):  # its own message may quote a password; no text has no `decode`
        split = urlsplit(base_url)
        parts = split if split.port is None or split.port >= 0 else None  # reading a port that is no number raises
    if (
        parts is None
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or set("@?#\\") & set(base_url)
        or not (base_url.isascii() and base_url.isprintable() and " " not in base_url)
    ):
        raise ValueError(_ADDRESS)
    local = parts.hostname == "localhost"
    with suppress(ValueError):  # a name, not a number
        number = ipaddress.ip_address(parts.hostname)
        local = number.is_loopback or number.is_unspecified  # 0.0.0.0, as servers print it, is this machine too
    if parts.scheme == "http" and not local and not allow_insecure:
        raise ValueError(
            f"base_url is http:// to {parts.netloc}, so anybody on the way could read the key. Use https://, or "
            "forward a port of this machine to that server (ssh -L) and use http://localhost. On a network that you "
            "trust, allow_insecure=True, --allow-insecure on the command line, takes the address as it is"
        )
    return base_url.rstrip("/"), parts.netloc, local


def _forms(keys: Iterable[str]) -> list[str]:
    """The spellings of the keys, as they are, in JSON and in a URL, longest first."""
    forms = {form for key in keys for form in (key, key.replace("/", "\\/"), quote(key, safe=""))}
    return sorted(forms, key=len, reverse=True)
