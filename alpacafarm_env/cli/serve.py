"""The command `serve`: an environment's rewards over HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ..arguments import SEED, whole_number
from ..errors import AlpacaFarmError, DataError, blaming, did_you_mean

_IDS: Final = "the id of an environment of texts, such as AlpacaFarm-PPO-v0, whose rewards they are"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `serve`."""
    parser.add_argument("id", metavar="ID", help=_IDS)
    text = "another oracle than the id's: a name such as gold or win_rate, or a mapping as JSON, as gym.make takes them"
    parser.add_argument("--oracle", metavar="SPEC", help=text)
    text = "a data set's name, folder or hub name (default: sandbox)"
    parser.add_argument("--dataset", default="sandbox", metavar="NAME", help=text)
    parser.add_argument("--seed", type=SEED, default=0, metavar="N", help="seeds the oracle's draws")
    text = "the trained model's folder or hub name: its tokenizer's special tokens are taken off a response's end"
    parser.add_argument("--tokenizer", metavar="NAME", help=f"for OpenRLHF (--reward.remote_url): {text}")
    text = "speak OpenEnv's protocol too: a session each, steps of all sessions in one call (the extra openenv)"
    parser.add_argument("--openenv", action="store_true", help=text)
    parser.add_argument("--host", default="127.0.0.1", help="the interface to listen on")
    text = "where to listen (default: 0, any free port)"
    parser.add_argument("--port", type=whole_number(0, 65535), default=0, metavar="N", help=text)
    text = "take a --host that other machines can reach, such as 0.0.0.0; anybody on the way can read the texts"
    parser.add_argument("--allow-remote", action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    """Serves until Ctrl-C, or until the process is asked to end; returns the exit status.

    Raises:
        AlpacaFarmError: The id, the data, the oracle, the tokenizer, or the address.
    """
    from ..data.load import load_dataset
    from ..envs.registration import IDS, TEXT_IDS, keywords_of
    from ..judge_server.http import serve
    from ..judge_server.scoring import ScoreServer
    from ..oracles.base import is_paid, judge
    from ..oracles.batched import MicroBatched
    from ..oracles.registry import make_oracle
    from ..pretrained import load_tokenizer
    from .export import read_oracle

    if options.id in IDS and options.id not in TEXT_IDS:
        text = "expected the id of an environment of texts, as an oracle scores whole responses"
        raise DataError(f"{options.id}: {text}. There are: {', '.join(TEXT_IDS)}.")
    if options.id not in TEXT_IDS:
        raise did_you_mean("id", options.id, TEXT_IDS)
    dataset, defaults = load_dataset(options.dataset), keywords_of(options.id)
    spec = defaults["oracle"] if options.oracle is None else read_oracle(options.oracle)
    with blaming("--oracle"):
        oracle = make_oracle(spec, dataset=dataset, seed=options.seed)
    if not is_paid(oracle):  # models and references are read, and what is lacking is told, before anybody waits for it
        judge(oracle, [str(dataset.instructions(defaults["split"])[0])], ["A first response."])
    tokens = None if options.tokenizer is None else load_tokenizer(options.tokenizer).all_special_tokens
    where = {"host": options.host, "port": options.port}

    batched, given = MicroBatched(oracle), {**where, "allow_remote": options.allow_remote}
    start: Callable[[], Any] = partial(ScoreServer, batched, tokens, **given)
    if options.openenv:
        make_app, server = _openenv()
        app = make_app(options.id, dataset, defaults["split"], batched)
        start = partial(server, batched, tokens, app=app, **given)
    return serve(start, lambda server: server.url, report=lambda server: server.report(), **where)


def _openenv() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from ..integrations.openenv import make_app
        from ..judge_server.asgi import AppServer
    except ImportError as error:
        text = f"--openenv needs the package openenv ({error}). Install it (pip install 'alpacafarm-env[openenv]')."
        raise AlpacaFarmError(text) from error
    return make_app, AppServer
