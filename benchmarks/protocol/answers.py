"""The protocol's generators and the cells of their answers.

The sandbox's own: writers, the shipped SFT policy, and best of 4 and of 16 of its samples by the shipped reward model.
From a finished method ranking: its stored answers to the evaluation instructions, its saved policies' to the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import sandbox
from ...errors import DataError
from ...sandbox import writers
from ..experiment.reward_models import MAX_RESPONSE_TOKENS
from ..harness.runner import Cell, quiet
from ..harness.stored import MANIFEST, file_name, read_stored, refuse_old_names
from ..harness.study import Row
from .held_out import EVAL, Question

Asked = Mapping[str, Question]
"""Set -> its instructions."""
Answers = Iterator[tuple[str, str, Sequence[str]]]
"""Generator, set of instructions and its answers."""
Answer = Callable[[Asked, int], Answers]
"""Answers sets of instructions with a seed."""
WRITERS: Final = {"crowd": writers.CROWD, "reference_again": writers.REFERENCE, **writers.API_MODELS}
BEST_OF: Final = (4, 16)
RANKING: Final = "method_ranking"
UNFINISHED: Final = f"--ranking: expected a file of a finished {RANKING}. Run that command to its end first."
SHARED: Final = ("sft", "gpt4", "chatgpt", "davinci001")
"""Methods of a ranking that are generators here already."""
RANKED: Final = "ranked "
"""Prefix of the generators from a ranking."""


def cells(asked: Callable[[], Asked], seeds: Sequence[int], ranking: Path | None) -> list[Cell]:
    """The cells that answer, each with a row for each of its generators and sets.

    Raises:
        DataError: The folder of the ranking is no finished one.
        CheckpointError: One of its files is gone or damaged.
    """
    own: dict[str, Answer] = {name: partial(answer_by_writer, name) for name in WRITERS}
    own |= {"sft": partial(answer_by_policy, "sft", sandbox.POLICY), "best_of_n": answer_by_best_of_n}
    made = [(name, seed, answer) for name, answer in own.items() for seed in seeds]
    made += ranked(ranking, seeds) if ranking else []
    return [
        Cell.silent(f"answers of {name}, seed {seed}", partial(_rows, answer, asked, seed))
        for name, seed, answer in made
    ]


def _rows(answer: Answer, asked: Callable[[], Asked], seed: int) -> list[Row]:
    return [
        {"generator": name, "set": which, "seed": seed, "answers": list(texts)}
        for name, which, texts in answer(asked(), seed)
    ]


def answer_by_writer(name: str, asked: Asked, seed: int) -> Answers:
    """A writer's answers."""
    writer = writers.StandIn(name, WRITERS[name], seed)
    return ((name, which, writer.act(question.instructions)) for which, question in asked.items())


def answer_by_best_of_n(asked: Asked, seed: int) -> Answers:
    """The best of the first 4, and of all 16 samples, by the shipped surrogate."""
    from ...agents import BestOfN, BestOfNConfig
    from ...oracles.registry import make_oracle

    quiet()
    config = BestOfNConfig(num_samples=max(BEST_OF), max_response_tokens=MAX_RESPONSE_TOKENS, batch_size=512)
    proxy = make_oracle("surrogate", dataset=sandbox.SANDBOX)
    agent = BestOfN(_policy(sandbox.POLICY), proxy, config=config, seed=seed)
    for which, question in asked.items():
        samples = agent.sample(question.instructions)
        for num in BEST_OF:
            best = np.argmax(samples.rewards[:, :num], axis=1).tolist()
            yield f"best_of_{num}", which, [row[i] for row, i in zip(samples.responses, best, strict=True)]


def answer_by_policy(name: str, folder: Path, asked: Asked, seed: int) -> Answers:
    """A saved policy's answers at temperature 0.7."""
    from ...agents import PolicyActor

    quiet()
    actor = PolicyActor(_policy(folder), seed=seed)
    return ((name, which, actor.act(question.instructions)) for which, question in asked.items())


def ranked(folder: Path, seeds: Sequence[int]) -> Iterator[tuple[str, int, Answer]]:
    """Name, seed and answers of a finished ranking's methods: seeds that both have, methods not in `SHARED`."""
    manifest = read_stored(folder / MANIFEST, shape={"cells": {"done": list}}, remedy=UNFINISHED)
    if manifest.get("name") != RANKING or manifest.get("complete") is not True:
        raise DataError(
            f"--ranking {folder}: expected the folder of a finished {RANKING}, got name {manifest.get('name')!r}, "
            f"complete {manifest.get('complete')!r}. Run that command to its end first."
        )
    refuse_old_names(folder)
    for path in sorted((folder / "cells").glob("*.json")):
        content = read_stored(path, "key", "rows", shape={"rows": [{"seed": object}]}, remedy=UNFINISHED)
        key, rows = content["key"], content["rows"]
        # The folder also keeps cells of earlier sources of a method of one's own that was edited.
        if key not in manifest["cells"]["done"] or not rows or rows[0].get("method") in (*SHARED, None):
            continue
        # A method that learns from no feedback has a row for each and one run for both.
        name = f"{RANKED}{rows[0]['method']}" + (f" ({rows[0]['feedback']})" if len(rows) == 1 else "")
        stored, policy = folder / "evaluations" / f"{file_name(key)}.json", folder / "runs" / file_name(key) / "policy"
        if rows[0]["seed"] in seeds:
            yield name, rows[0]["seed"], partial(answer_as_ranked, name, stored, policy)


def answer_as_ranked(name: str, stored: Path, policy: Path, asked: Asked, seed: int) -> Answers:
    """The stored answers to the evaluation instructions and the saved policy's, if there is one, to the others.

    Raises:
        DataError: An evaluation instruction has no stored answer.
    """
    both = ("instructions", "responses")
    content = read_stored(stored, *both, shape=dict.fromkeys(both, list), remedy=UNFINISHED)
    known = dict(zip(content["instructions"], content["responses"], strict=True))
    wanted = [str(row) for row in asked[EVAL].instructions]
    if missing := [text for text in wanted if text not in known]:
        raise DataError(
            f"{stored}: expected an answer to each of {len(wanted)} evaluation instructions, got none to "
            f"{len(missing)} of them, such as {missing[0]!r}. Rank all instructions, or take --quick here too."
        )
    yield name, EVAL, [known[text] for text in wanted]
    if policy.is_dir():
        others = {which: question for which, question in asked.items() if which != EVAL}
        yield from answer_by_policy(name, policy, others, seed)


@cache
def _policy(folder: Path) -> Any:
    from ...agents import LanguageModel

    return LanguageModel.from_pretrained(folder, max_response_tokens=MAX_RESPONSE_TOKENS)
