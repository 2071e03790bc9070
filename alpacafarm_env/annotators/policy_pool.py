"""A pool of annotators whose prompts a policy in this process answers: the same model as oracle and policy.

    judge = make_policy_pool("eval", policy=agent)  # or oracle={"pool": "eval", "policy": agent}

Annotators, orders and noise are drawn as by a pool behind a server, and its prompts and its reading of replies are the
same. Each pair is asked about alone, as one text in the policy's own template, and asked once: there is nothing to pay
and no ledger. Pools have long prompts; for a small policy see `oracles.policies`.
Source: Yuan et al. 2024, "Self-Rewarding Language Models" (arXiv 2401.10020), with the pools' prompts for theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import PoolError, UnparsableVerdictError
from ..llm.replies import Reply
from ..oracles.base import UNSCORED_REASON, DetailedJudge, PreferenceOracle, Verdicts, place
from ..oracles.draws import KeyedDraws
from ..oracles.policies import first_token_logprobs, language_model, too_long
from ..seeding import keyed_rng
from .config import PoolConfig, check_form, load_pool, load_prompt
from .pool import AlpacaFarmDraws, Compat, show, with_noise
from .prompts import parse, render

_TOP: Final = 20
"""Likeliest first tokens that a prompt for log-probabilities reads, as of a server."""


class PolicyPool(DetailedJudge):
    """Verdicts of a policy, asked by the prompts of a pool: 0 or 1, or between for prompts that read probabilities.

    A reply is a function of the seed, the pair and the policy's weights as they are then: one that learns is a judge
    that changes. It ends at the annotator's `max_tokens`, or at the policy's longest response if that comes first.

    Args:
        pool: The name of a pool, a YAML file, or a `PoolConfig`. Its noise is not added here, see `make_policy_pool`.
        policy: An agent with a language model in this process, a `LanguageModel`, or the folder of one.
        seed: Another seed is another opinion on the same pairs.
        in_order: Show `a` first, instead of drawing which response is (for `BothOrders`).
        compat: "alpacafarm" draws annotators and orders as the released code does.

    Raises:
        TypeError, CheckpointError: `policy` is none.
        PoolError: The pool is malformed, or has a `top_p` below 1, which a policy in this process does not know.
    """

    blank: Final[Mapping[str, Any]] = {"annotator": "", "shown_first": "", UNSCORED_REASON: ""}

    def __init__(
        self,
        pool: str | Path | PoolConfig,
        policy: Any,
        *,
        seed: int = 0,
        in_order: bool = False,
        compat: Compat | None = None,
    ) -> None:
        self.config = pool if isinstance(pool, PoolConfig) else load_pool(pool)
        check_form(self.config, rates=False)
        if cut := [each.name for each in self.config.annotators if each.top_p < 1]:
            raise PoolError(f"Pool {self.config.name!r}: a policy answers with top_p 1 alone; {cut[0]} has another.")
        self.name = f"{self.config.name}+policy" + (f"+{compat}_draws" if compat else "")
        self.seed, self.draws_order = seed, not in_order
        self._policy = language_model(policy)
        self._prompts = [load_prompt(each.prompt) for each in self.config.annotators]
        self._draws = AlpacaFarmDraws(seed) if compat else KeyedDraws(seed, self.config.stream)

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """P(b preferred), [B]; 0.5 for equal texts, which are not asked about.

        NaN, with the reason as detail `unscored_reason`, for a prompt that the policy cannot read and a reply that is
        no verdict. Details are also `annotator` and `shown_first` ("a" or "b"); errors those of `AnnotatorPool.judge`
        that no server makes.
        """
        pairs = list(zip(instructions, a, b, strict=True))
        shown = show(self._draws, pairs, len(self.config.annotators), in_order=not self.draws_order)
        rows = np.array([each is not None for each in shown], bool)
        queried = [each for each in shown if each is not None]
        texts = [str(render(self._prompts[who], [item], "completion")) for who, item in queried]
        answers = self._answers(texts, [who for who, _ in queried])
        b_first = np.array([each is not None and each[1].first == b[row] for row, each in enumerate(shown)], bool)
        scores = np.full(len(pairs), 0.5)
        scores[rows] = [np.nan if isinstance(answer, str) else answer for answer in answers]
        details = {
            "annotator": np.array([self.config.annotators[who].name for who, _ in queried], object),
            "shown_first": np.where(b_first[rows], "b", "a").astype(object),
            UNSCORED_REASON: np.array([answer if isinstance(answer, str) else "" for answer in answers], object),
        }
        return Verdicts(np.where(b_first, 1 - scores, scores), place(details, rows, self.blank))

    def _answers(self, texts: Sequence[str], who: Sequence[int]) -> list[float | str]:
        """P(second shown preferred) by each text's annotator, or why there is none."""
        answers: list[float | str] = list(too_long(self._policy, texts))
        kinds: dict[tuple[bool, float, int], list[int]] = {}  # what is decoded together
        for row, (number, reason) in enumerate(zip(who, answers, strict=True)):
            if not reason:
                member, by_logprobs = self.config.annotators[number], self._prompts[number].format == "logprobs"
                width = min(member.max_tokens, self._policy.max_response_tokens)
                kinds.setdefault((by_logprobs, member.temperature, width), []).append(row)
        for (by_logprobs, temperature, width), rows in kinds.items():
            chosen = [texts[row] for row in rows]
            replies = self._first_tokens(chosen) if by_logprobs else self._replies(chosen, temperature, width)
            for row, reply in zip(rows, replies, strict=True):
                try:
                    answers[row] = parse(self._prompts[who[row]].format, reply, 1)[0].score
                except UnparsableVerdictError as error:
                    answers[row] = f"{type(error).__name__}: {error}"
        return answers

    def _replies(self, texts: Sequence[str], temperature: float, width: int) -> list[Reply]:
        import torch

        drawn = [keyed_rng(self.seed, "reply", text).random(width, np.float32) for text in texts]
        options = {"temperature": temperature, "max_new_tokens": width}
        said = self._policy.generate(texts, generator=torch.from_numpy(np.stack(drawn)), **options)
        ends = ["stop" if finished else "length" for finished in said.finished.tolist()]
        return [Reply(text, end) for text, end in zip(said.texts, ends, strict=True)]

    def _first_tokens(self, texts: Sequence[str]) -> list[Reply]:
        replies: dict[int, Reply] = {}
        for rows, logprobs in first_token_logprobs(self._policy, texts):
            values, tokens = logprobs.topk(min(_TOP, logprobs.shape[1]))
            for row, chances, ids in zip(rows, values.tolist(), tokens.tolist(), strict=True):
                words = self._policy.tokenizer.batch_decode([[token] for token in ids])
                # Of two tokens that are spelled alike the likelier counts, as in a server's mapping.
                first = dict(reversed(list(zip(words, chances, strict=True))))
                replies[row] = Reply(words[0], logprobs=(first,))
        return [replies[row] for row in range(len(texts))]


def make_policy_pool(
    pool: str | Path | PoolConfig,
    *,
    policy: Any,
    seed: int = 0,
    flip: float | None = None,
    both_orders: bool = False,
    compat: Compat | None = None,
) -> PreferenceOracle:
    """A `PolicyPool` with its noise, asked in one order or both: keywords and errors as of `pool.make_pool`."""
    judge = PolicyPool(pool, policy, seed=seed, in_order=both_orders, compat=compat)
    return with_noise(judge, judge.config, flip=flip, both_orders=both_orders, compat=compat, seed=seed)
