"""The best responses of a round of expert iteration, the sealed folders they are stored in, and learning from them."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from ..instructions import Demonstration, Instruction
from . import checkpoints
from .best_of_n import BestOfNSamples
from .language_model import LanguageModel
from .rollouts import Rollouts, ragged
from .sft import SFT, SFTConfig


@dataclass(frozen=True, kw_only=True)
class BestResponse:
    """The best of n responses to one instruction: a line of best.jsonl."""

    row: int
    """The instruction's number among those used."""
    id: int
    """The instruction's id in its split."""
    instruction: str
    """Without the input."""
    input: str
    """"" for none."""
    response: str | None
    """None if none has a reward."""
    reward: float | None
    mean_reward: float | None
    """Of all responses that have one."""
    num_scored: int
    """How many have a reward."""
    finished: bool
    """Whether the best response ended by itself."""


def best_responses(rows: Sequence[int], samples: BestOfNSamples) -> list[BestResponse]:
    """The best of each `Instruction`'s samples, the first of equals; `rows` are the instructions' numbers."""
    found = []
    scored = ~np.isnan(samples.rewards)
    best = np.where(scored, samples.rewards, -np.inf).argmax(axis=1).tolist()
    for i, (row, instruction) in enumerate(zip(rows, samples.instructions, strict=True)):
        assert isinstance(instruction, Instruction)
        known = samples.rewards[i, scored[i]].tolist()
        found.append(
            BestResponse(
                row=row,
                id=instruction.id,
                instruction=instruction.instruction,
                input=instruction.input,
                response=samples.responses[i][best[i]] if known else None,
                reward=max(known, default=None),
                mean_reward=math.fsum(known) / len(known) if known else None,
                num_scored=len(known),
                finished=bool(known and samples.finished[i, best[i]]),
            )
        )
    return found


def reward_metrics(rows: Sequence[BestResponse]) -> dict[str, float]:
    """reward/best, reward/mean (over all samples), reward/unscored (share of rows) and finished; NaN of nothing."""
    best = [row for row in rows if row.reward is not None]
    num_scored = sum(row.num_scored for row in best)
    total = math.fsum((row.mean_reward or 0.0) * row.num_scored for row in best)
    return {
        "reward/best": math.fsum(row.reward or 0.0 for row in best) / len(best) if best else math.nan,
        "reward/mean": total / num_scored if best else math.nan,
        "reward/unscored": 1 - len(best) / len(rows),
        "finished": sum(row.finished for row in best) / len(best) if best else math.nan,
    }


def without_nan(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with None for NaN, which JSON does not have."""
    return {name: None if value is None or math.isnan(value) else value for name, value in metrics.items()}


def write_chunk(folder: Path, rows: Sequence[BestResponse], metrics: Mapping[str, float]) -> None:
    """Write best.jsonl and metrics.json, in one rename."""

    def fill(draft: Path) -> None:
        lines = [json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows]
        (draft / "best.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
        checkpoints.write_json(draft / "metrics.json", without_nan(metrics))

    checkpoints.publish(folder, fill)


def read_chunk(folder: Path) -> tuple[list[BestResponse], dict[str, Any]] | None:
    """Rows and metrics of a stored chunk; None if there is none, or, with a warning, if it is damaged."""
    if not folder.exists():
        return None
    try:
        checkpoints.check(folder)
    except CheckpointError as error:
        warnings.warn(f"Sampling a chunk again: {error}", stacklevel=2)
        return None
    # Not splitlines: a response may hold characters that count as ends of lines there.
    lines = (folder / "best.jsonl").read_text(encoding="utf-8").split("\n")
    return [BestResponse(**json.loads(line)) for line in lines if line], checkpoints.read_json(folder / "metrics.json")


class Imitation(SFT):
    """SFT on best responses, each of which ends if and only if it ended when it was sampled.

    Reading a text back need not give the tokens that it was made of, so their number does not say whether it was cut
    off. One that was is cut at `longest` tokens, the limit of sampling, once more; one that ended by itself is kept
    whole. Left out are instructions without a response, and responses that were cut off before any text.
    """

    def __init__(
        self,
        policy: LanguageModel,
        instructions: Sequence[Instruction],
        best: Sequence[BestResponse],
        *,
        longest: int,
        config: SFTConfig,
        seed: int,
        out: Path | None,
    ) -> None:
        given = [row for row in best if row.response is not None]
        encoded = policy.encode_responses([row.response or "" for row in given], eos=False)
        pairs = [(row, tokens) for row, tokens in zip(given, encoded, strict=True) if tokens or row.finished]
        end = [policy.template.end_id(policy.tokenizer)]
        self._imitated = [tokens + end if row.finished else tokens[:longest] for row, tokens in pairs]
        self._finished = [row.finished for row, _ in pairs]
        demonstrations = [Demonstration(instructions[row.row], row.response or "") for row, _ in pairs]
        with warnings.catch_warnings():
            # What SFT would cut is replaced here, and `finished` counts what sampling has cut.
            warnings.filterwarnings("ignore", message=r"\d+ of \d+ responses are cut to max_response_tokens")
            super().__init__(policy, demonstrations, config=config, seed=seed, out=out)

    def _training_data(self, data: Rollouts) -> Rollouts:
        tokens, lengths = ragged(self._imitated, data.tokens.device)
        finished = torch.tensor(self._finished, device=tokens.device)
        logprobs = torch.zeros(len(tokens), device=tokens.device)
        return replace(data, tokens=tokens, lengths=lengths, logprobs=logprobs, finished=finished)
