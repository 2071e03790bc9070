"""The protocol's generators and the cells of their answers: writers, the SFT policy, and the best of its samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

import numpy as np

from ... import sandbox
from ...sandbox import writers
from ..experiment.reward_models import MAX_RESPONSE_TOKENS
from ..harness.runner import Cell, quiet
from ..harness.study import Row
from .held_out import Question

Questions = Mapping[str, Question]
"""Set -> its instructions."""
Answers = Iterator[tuple[str, str, Sequence[str]]]
"""Generator, set of instructions and its answers."""
WRITERS: Final = {"crowd": writers.CROWD, "reference_again": writers.REFERENCE, **writers.API_MODELS}
BEST_OF: Final = (4, 16)


def cells(questions: Callable[[], Questions], seeds: Sequence[int]) -> list[Cell]:
    """The cells that answer, each with a row for each of its generators and sets."""
    answerers: dict[str, Callable[[Questions, int], Answers]] = {name: partial(by_writer, name) for name in WRITERS}
    answerers |= {"sft": by_policy, "best_of_n": by_best_of_n}

    def rows(name: str, seed: int) -> list[Row]:
        return [
            {"generator": generator, "set": which, "seed": seed, "answers": list(texts)}
            for generator, which, texts in answerers[name](questions(), seed)
        ]

    both = [(name, seed) for name in answerers for seed in seeds]
    return [Cell.silent(f"answers of {name}, seed {seed}", partial(rows, name, seed)) for name, seed in both]


def by_writer(name: str, questions: Questions, seed: int) -> Answers:
    """A writer's answers."""
    writer = writers.StandIn(name, WRITERS[name], seed)
    return ((name, which, writer.act(question.instructions)) for which, question in questions.items())


def by_policy(questions: Questions, seed: int) -> Answers:
    """The shipped SFT policy's answers at temperature 0.7."""
    from ...agents import PolicyActor

    quiet()
    actor = PolicyActor(_policy(), seed=seed)
    return (("sft", which, actor.act(question.instructions)) for which, question in questions.items())


def by_best_of_n(questions: Questions, seed: int) -> Answers:
    """The best of the first 4, and of all 16 samples, by the shipped surrogate."""
    from ...agents import BestOfN, BestOfNConfig
    from ...oracles import make_oracle

    quiet()
    config = BestOfNConfig(num_samples=max(BEST_OF), max_response_tokens=MAX_RESPONSE_TOKENS, batch_size=512)
    agent = BestOfN(_policy(), make_oracle("surrogate", dataset=sandbox.SANDBOX), config=config, seed=seed)
    for which, question in questions.items():
        samples = agent.sample(question.instructions)
        for num in BEST_OF:
            best = np.argmax(samples.rewards[:, :num], axis=1).tolist()
            yield f"best_of_{num}", which, [row[i] for row, i in zip(samples.responses, best, strict=True)]


@cache
def _policy() -> Any:
    from ...agents import LanguageModel

    return LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS)
