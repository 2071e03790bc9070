"""The commands `show`, `ledger`, `data`, `export`, `merge`, `serve` and `judge-server`.

Heavy modules are imported when a command runs: the command line's help needs none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pydantic
import tyro

from ..data.forms import FORMATS
from ..errors import AlpacaFarmError, DataError, LedgerError, blaming
from ..plugins import find_attribute
from .options import Count, Options, Port, Report, Seed

MERGE: Final = "alpacafarm_env.agents.policy_agent:merge_folder"
"""The agents lie above the commands, so nothing of theirs is imported."""


@dataclass(frozen=True, kw_only=True)
class Show(Options):
    """Pages of the sandbox."""

    split: str = "eval"
    """sft, preference, unlabeled, val or eval."""
    num: Count = 5
    """How many instructions."""
    seed: Seed = 0
    """Picks instructions and responses."""

    def run(self) -> Report:
        """Page after page.

        Raises:
            AlpacaFarmError: There is no such split.
        """
        from transformers.utils import logging

        from ..sandbox.show import show

        hide_progress: Callable[[], None] = logging.disable_progress_bar
        hide_progress()  # a bar for 2 MB of weights
        return Report(blocks=show(self.split, num=self.num, seed=self.seed))


@dataclass(frozen=True, kw_only=True)
class ShowLedger(Options):
    """A ledger's spending."""

    ledger: Path | None = None
    """The ledger. Default: your own."""

    def run(self) -> Report:
        """The spending of a ledger, by host, model and annotator.

        Answered, failed, unknown and running are attempts at a request, and unpriced those of models without a known
        price, which count nothing; questions are the pairs or responses judged in those answered, a pair asked in both
        orders counted twice.

        Raises:
            LedgerError: There is no such ledger, or it cannot be read.
        """
        from ..llm.ledger import Ledger
        from ..llm.ledger import operations as sql
        from ..llm.ledger.file import default_path
        from ..terminal import format_table

        path = self.ledger or default_path()
        if not os.path.lexists(path):
            raise LedgerError(f"There is no ledger at {path}. Name the --ledger of a run; the first run makes one.")
        with Ledger(path, replay=True) as opened:
            spending = opened.do(sql.spending).result()
        total, counts = spending.sum(), list(spending.columns.drop(["usd", "reserved_usd"]))
        spending.loc[("total", "", ""), :] = total
        table = spending.astype(dict.fromkeys(counts, int)).rename_axis(["host", "model", "annotator"]).reset_index()
        table["usd"] = table["usd"].map("{:.4f}".format)
        columns = ("host", "model", "annotator", *counts, "usd")
        rows: list[Any] = table.to_dict("records")
        lines = [f"{path}", format_table(columns, rows, left=3)]
        if total.reserved_usd:
            text = "may not have been paid: the most of unknown and running."
            lines.append(f"Of the total, ${total.reserved_usd:.4f} {text}")
        return Report("\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class Merge(Options):
    """A whole model of an adapter and its base."""

    folder: tyro.conf.Positional[Path]
    """The adapter's folder, a policy's or a reward model's."""
    out: tyro.conf.Positional[Path]
    """A new folder for the whole model."""

    def run(self) -> Report:
        """Writes the whole model that an adapter and its base make.

        Raises:
            AlpacaFarmError: There is no adapter, no base, or no room for the model.
        """
        find_attribute("function", MERGE)(self.folder, self.out)
        return Report(f"written: {self.out}, a whole model. Its README.md says how to load it.")


@dataclass(frozen=True, kw_only=True)
class DataAlpacaEval(Options):
    """AlpacaEval's published responses and verdicts."""

    checkout: tyro.conf.Positional[Path]
    """A folder with a clone of github.com/tatsu-lab/alpaca_eval."""
    older: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """A checkout of an older commit, for what the newest lacks; may be given several times, the newest first."""
    out: Path
    """A new folder for the data."""

    def run(self) -> Report:
        """Writes the folder that --data and --dataset take, and says what was left out and why.

        Raises:
            DataError: A folder is no such checkout, or --out has content.
        """
        from ..data.alpaca_eval import make_recorded

        made = make_recorded((self.checkout, *self.older), self.out)
        study = f"python -m alpacafarm_env.benchmarks.recorded_noise --data {self.out} --quick"
        return Report(f"{made}\nwritten: {self.out}\nWhat noisy labels do to it, in a figure: {study}")


@dataclass(frozen=True, kw_only=True)
class OracleOptions(Options):
    """An oracle over a data set."""

    dataset: str = "sandbox"
    """A data set's name, folder or hub name."""
    oracle: str | None = None
    """Who rewards: a name such as gold or win_rate, or a mapping as JSON, as gym.make takes them."""
    seed: Seed = 0
    """Seeds the oracle's draws."""


@dataclass(frozen=True, kw_only=True)
class Export(OracleOptions):
    """A split as files."""

    format: Literal["trl", "alpacafarm", "verl", "openrlhf"]
    """Who is to read them: trl and alpacafarm get demonstrations or preferences, with scores if an --oracle is given;
    verl and openrlhf get prompts, and need an --oracle."""
    out: Path
    """The folder where the files go."""
    split: str = "unlabeled"
    """sft, preference, unlabeled, val or eval."""
    to: Literal["jsonl", "parquet", "hub-folder"] | None = None
    """Of trl and alpacafarm, the kind of file (default: jsonl); a hub-folder is Parquet with a dataset card."""

    def run(self) -> Report:
        """Writes a split's data, or its prompts and a reward, and says how they are read.

        Raises:
            AlpacaFarmError: The data, the oracle, the folder, or an option that the format does not have.
        """
        from . import export as files

        oracle = None if self.oracle is None else files.read_oracle(self.oracle)
        options: dict[str, Any] = {"dataset": self.dataset, "split": self.split, "oracle": oracle, "seed": self.seed}
        if self.format in FORMATS:
            written = files.export_split(self.format, to=self.to or "jsonl", out=self.out, **options)
            return Report("\n".join(f"written: {path}" for path in written))
        if oracle is None or self.to is not None:
            wanted = "an --oracle, for the rewards" if oracle is None else "no --to: it has one kind of file"
            raise DataError(f"--format {self.format}: expected {wanted}.")
        written = files.export_prompts(self.format, out=self.out, **options)
        if self.format == "verl":
            use = f"data.train_files={written[0]} reward.custom_reward_function.path={written[1]}"
        else:
            oracle_options = f"--dataset {self.dataset} --oracle '{self.oracle}' --seed {self.seed}"
            keys = "--data.input_key input --data.label_key label --data.apply_chat_template"
            use = f"--data.prompt_dataset {written[0]} {keys} --reward.remote_url URL"
            use += f"\nURL: printed by alpacafarm serve AlpacaFarm-PPO-v0 {oracle_options} --tokenizer MODEL"
        return Report("\n".join([*(f"written: {path}" for path in written), f"{self.format}: {use}"]))


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """Where a server listens."""

    host: str = "127.0.0.1"
    """The interface to listen on."""
    port: Port = 0
    """Where to listen; 0 for any free port."""
    allow_remote: bool = False
    """Take a --host that other machines can reach, such as 0.0.0.0; anybody on the way can read the texts."""

    @property
    def where(self) -> dict[str, Any]:
        """Keywords of a server."""
        return {"host": self.host, "port": self.port, "allow_remote": self.allow_remote}


@dataclass(frozen=True, kw_only=True)
class Serve(ServerOptions, OracleOptions):
    """Rewards over HTTP. --oracle replaces the environment's own."""

    id: tyro.conf.Positional[str]
    """The id of an environment of texts, such as AlpacaFarm-PPO-v0, whose rewards they are."""
    tokenizer: str | None = None
    """For OpenRLHF (--reward.remote_url), the trained model's folder or hub name: its tokenizer's special tokens are
    taken off a response's end."""
    openenv: bool = False
    """Speak OpenEnv's protocol too: a session each, steps of all sessions in one call (the extra openenv)."""

    def run(self) -> Report:
        """Serves until Ctrl-C, or until the process is asked to end.

        Raises:
            AlpacaFarmError: The id, the data, the oracle, the tokenizer, or the address.
        """
        from ..arguments import match_name
        from ..data.load import load_dataset
        from ..envs.registration import IDS, TEXT_IDS, keywords_of
        from ..judge_server.http import serve
        from ..judge_server.scoring import ScoreServer
        from ..oracles import make_oracle
        from ..oracles.base import is_paid, judge
        from ..oracles.batched import MicroBatched
        from ..pretrained import load_tokenizer
        from .export import read_oracle

        if (env_id := match_name("id", self.id, IDS)) not in TEXT_IDS:
            text = "expected the id of an environment of texts, as an oracle scores whole responses"
            raise DataError(f"{env_id}: {text}. There are: {', '.join(TEXT_IDS)}.")
        dataset, defaults = load_dataset(self.dataset), keywords_of(env_id)
        spec = defaults["oracle"] if self.oracle is None else read_oracle(self.oracle)
        with blaming("--oracle"):
            oracle = make_oracle(spec, dataset=dataset, seed=self.seed)
        if not is_paid(oracle):  # models and references are read, and what is lacking is said, before anybody waits
            judge(oracle, [str(dataset.instructions(defaults["split"])[0])], ["A first response."])
        tokens = None if self.tokenizer is None else load_tokenizer(self.tokenizer).all_special_tokens
        batched = MicroBatched(oracle)
        app = _openenv_app(env_id, dataset, defaults["split"], batched) if self.openenv else None
        start = partial(ScoreServer, batched, tokens, app=app, **self.where)
        return Report(status=serve(start, host=self.host, port=self.port))


def _openenv_app(*args: Any) -> Any:
    try:
        from ..integrations.openenv import make_app
    except ImportError as error:
        text = f"--openenv needs the package openenv ({error}). Install it (pip install 'alpacafarm-env[openenv]')."
        raise AlpacaFarmError(text) from error
    return make_app(*args)


@dataclass(frozen=True, kw_only=True)
class ServeJudges(ServerOptions):
    """The sandbox's annotators over an OpenAI-compatible API on this machine."""

    seed: Seed = 0
    """Seeds the verdicts of requests without a seed."""
    latency: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds an answer takes at least."""
    pools: Annotated[tuple[Path, ...], tyro.conf.arg(name="pool"), tyro.conf.UseAppendAction] = ()
    """A pool of your own, whose prompts are to be read; may be given several times."""
    anyway: bool = False
    """Judge instructions that are not the sandbox's too, by length, lists, courtesy and position alone: such
    verdicts say nothing of the responses."""

    def run(self) -> Report:
        """Serves until Ctrl-C.

        Raises:
            AlpacaFarmError: The host or port cannot be had.
        """
        from ..judge_server.http import serve
        from ..judge_server.server import JudgeServer

        own: dict[str, Any] = {"seed": self.seed, "latency_s": self.latency, "pools": self.pools, "anyway": self.anyway}
        return Report(status=serve(lambda: JudgeServer(**self.where, **own), host=self.host, port=self.port))
