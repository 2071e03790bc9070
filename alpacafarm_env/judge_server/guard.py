"""Who may ask a server on this machine: its programs, and no page of another site that is open in a browser."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from ..oracles.base import shorten
from .replies import HttpReply, as_error


def is_loopback(name: str) -> bool:
    """Whether a host's name or address is this machine's alone."""
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def refusal(host: str | None, origin: str | None, *, allow_remote: bool) -> HttpReply | None:
    """The refusal of a request that another site's page makes a browser send; None for any other request.

    A browser says from which site's page it comes (`origin`), and by which name it found the server (`host`): a site
    can have its own name point to this machine. Programs say no Origin, and the name that they were given.
    """
    name = _name(f"//{host}")
    if host and not allow_remote and not is_loopback(name):
        return _refused("Host", host, "a name of this machine, such as 127.0.0.1 (any with --allow-remote)")
    if origin is not None and (sender := _name(origin)) != name and not is_loopback(sender):
        return _refused("Origin", origin, "no page of another site")
    return None


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _refused(field: str, found: str, wanted: str) -> HttpReply:
    return as_error(403, f"{field}: expected {wanted}, got {shorten(found)}.", "forbidden", field)
