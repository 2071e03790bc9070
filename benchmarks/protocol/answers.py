"""Who answers the protocol's instructions, and what is kept of the answers.

The sandbox's own: writers (the crowd, the reference written once more, the stand-ins for models behind an API), the
shipped SFT policy, and best of 4 and of 16 of its samples by the shipped reward model. From a finished method ranking:
its stored answers to the evaluation instructions, and answers of the policies it saved to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import sandbox
from ...errors import DataError
from ...sandbox import writers
from ..harness.reward_models import MAX_RESPONSE_TOKENS
from ..harness.runner import Cell, quiet
from ..harness.stored import MANIFEST, file_name, read_stored
from ..harness.study import Row
from ..methods.methods import StandIn
from .live import EVAL, Question

Asked = Mapping[str, Question]
"""Set -> its instructions."""
Answers = dict[str, dict[str, list[str]]]
"""Generator -> set of instructions -> its answers, one each; a set that it did not answer is absent."""
Answer = Callable[[Asked, int], Answers]
"""What answers sets of instructions with a seed."""
Answering = tuple[str, int, Answer]
"""Name, seed and who answers; one may be several generators."""
WRITERS: Final = {"crowd": writers.CROWD, "reference_again": writers.REFERENCE, **writers.API_MODELS}
BEST_OF: Final = (4, 16)
BOTH: Final = ("instructions", "responses")
RANKING: Final = "method_ranking"
UNFINISHED: Final = f"--ranking: expected a file of a finished {RANKING}. Run that command to its end first."
SHARED: Final = ("sft", "gpt4", "chatgpt", "davinci001")
"""Methods of a ranking that are generators here already."""
RANKED: Final = "ranked "
"""How the names of generators from a ranking begin."""


def answering(made: Iterable[Answering], asked: Callable[[], Asked]) -> list[Cell]:
    """The cells of a study that answer: a row for each generator and set."""
    return [
        Cell.silent(f"answers of {name}, seed {seed}", partial(_rows, who, asked, seed)) for name, seed, who in made
    ]


def _rows(answer: Answer, asked: Callable[[], Asked], seed: int) -> list[Row]:
    return [
        {"generator": name, "set": which, "seed": seed, "answers": answers}
        for name, by_set in answer(asked(), seed).items()
        for which, answers in by_set.items()
    ]


def collect(rows: Iterable[Row]) -> dict[str, dict[str, dict[int, list[str]]]]:
    """Generator -> set -> seed -> answers, of the finished cells."""
    found: dict[str, dict[str, dict[int, list[str]]]] = {}
    for row in rows:
        found.setdefault(row["generator"], {}).setdefault(row["set"], {})[row["seed"]] = row["answers"]
    return found


def own(seeds: Sequence[int]) -> Iterator[Answering]:
    """The sandbox's own generators."""
    made: dict[str, Answer] = {name: partial(answer_by_writer, name, habits) for name, habits in WRITERS.items()}
    made |= {"sft": lambda *asked: {"sft": answer_by_policy(sandbox.POLICY, *asked)}, "best_of_n": answer_by_best_of_n}
    return ((name, seed, answer) for name, answer in made.items() for seed in seeds)


def answer_by_writer(name: str, habits: writers.Writer, asked: Asked, seed: int) -> Answers:
    """A writer's answers."""
    writer = StandIn(name, habits, seed)
    return {name: {which: list(writer.act(question.instructions)) for which, question in asked.items()}}


def answer_by_best_of_n(asked: Asked, seed: int) -> Answers:
    """Best of the first 4, and of 16 samples, by the shipped surrogate; a smaller run's samples are the first ones."""
    from ...agents import BestOfN, BestOfNConfig
    from ...oracles.registry import make_oracle

    quiet()
    config = BestOfNConfig(num_samples=max(BEST_OF), max_response_tokens=MAX_RESPONSE_TOKENS, batch_size=512)
    agent = BestOfN(
        _policy(sandbox.POLICY), make_oracle("surrogate", dataset=sandbox.SANDBOX), config=config, seed=seed
    )
    found: Answers = {f"best_of_{num}": {} for num in BEST_OF}
    for which, question in asked.items():
        samples = agent.sample(question.instructions)
        for num in BEST_OF:
            best = np.argmax(samples.rewards[:, :num], axis=1)
            found[f"best_of_{num}"][which] = [row[i] for row, i in zip(samples.responses, best.tolist(), strict=True)]
    return found


def answer_by_policy(folder: Path, asked: Asked, seed: int) -> dict[str, list[str]]:
    """A saved policy's answers at temperature 0.7."""
    from ...agents import PolicyActor

    quiet()
    actor = PolicyActor(_policy(folder), seed=seed)
    return {which: list(actor.act(question.instructions)) for which, question in asked.items()}


def ranked(folder: Path, seeds: Sequence[int]) -> Iterator[Answering]:
    """The methods of a finished ranking, seeds that both have, without those that are here already.

    Raises:
        DataError: The folder is no finished method ranking.
        CheckpointError: One of its files is gone or damaged.
    """
    manifest = read_stored(folder / MANIFEST, shape={"cells": {"done": list}}, remedy=UNFINISHED)
    if manifest.get("name") != RANKING or manifest.get("complete") is not True:
        raise DataError(
            f"--ranking {folder}: expected the folder of a finished {RANKING}, got name {manifest.get('name')!r}, "
            f"complete {manifest.get('complete')!r}. Run that command to its end first."
        )
    for path in sorted((folder / "cells").glob("*.json")):
        content = read_stored(path, "key", "rows", shape={"rows": [{"seed": object}]}, remedy=UNFINISHED)
        key, rows = content["key"], content["rows"]
        # Of a method of one's own that was edited since, the folder has the cells of its earlier sources too.
        if key not in manifest["cells"]["done"] or not rows or rows[0].get("method") in (*SHARED, None):
            continue
        # A method that learns from no feedback has a row for each and one run for both.
        name = f"{RANKED}{rows[0]['method']}" + (f" ({rows[0]['feedback']})" if len(rows) == 1 else "")
        stored, policy = folder / "evaluations" / f"{file_name(key)}.json", folder / "runs" / file_name(key) / "policy"
        if rows[0]["seed"] in seeds:
            yield name, rows[0]["seed"], partial(answer_as_ranked, name, stored, policy)


def answer_as_ranked(name: str, stored: Path, policy: Path, asked: Asked, seed: int) -> Answers:
    """Stored answers to the evaluation instructions, the saved policy's, if there is one, to the others.

    Raises:
        DataError: An evaluation instruction has no stored answer.
    """
    content = read_stored(stored, *BOTH, shape=dict.fromkeys(BOTH, list), remedy=UNFINISHED)
    known = dict(zip(content["instructions"], content["responses"], strict=True))
    wanted = [str(row) for row in asked[EVAL].instructions]
    if missing := [text for text in wanted if text not in known]:
        raise DataError(
            f"{stored}: expected an answer to each of {len(wanted)} evaluation instructions, got none to "
            f"{len(missing)} of them, such as {missing[0]!r}. Rank all instructions, or take --quick here too."
        )
    others = {which: question for which, question in asked.items() if which != EVAL}
    more = answer_by_policy(policy, others, seed) if policy.is_dir() else {}
    return {name: {EVAL: [known[text] for text in wanted], **more}}


@cache
def _policy(folder: Path) -> Any:
    from ...agents import LanguageModel

    return LanguageModel.from_pretrained(folder, max_response_tokens=MAX_RESPONSE_TOKENS)
