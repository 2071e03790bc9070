"""Best-of-n of the over-optimization study: one set of samples a seed, from which every treatment chooses.

A policy of the sandbox says many things twice: each distinct response is stored, judged and scored once.
"""

import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ... import agents, sandbox
from ...data.files import write_atomic
from ...errors import CheckpointError, DataError
from ...instructions import Instruction
from ...oracles.base import Constant, judge
from ...sandbox.dataset import read_rows, write_rows
from ..experiment.engine import checked, read_evaluation, write_evaluation
from ..experiment.evaluation import DISAGREEMENT, WIN_RATES, Evaluation, evaluate, judges_of
from ..experiment.reward_models import MAX_RESPONSE_TOKENS
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.stored import cell_file, check_settings
from ..harness.study import Row
from .analysis import MEASURES
from .runs import TEMPERATURE, TreatmentRun

JUDGED: Final = ("gold", "win_rate_simulated", "win_rate_human")
Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Drawn:
    """N samples of each of P instructions, D of them distinct."""

    instructions: list[Instruction]
    index: NDArray[np.int64]
    """[P, N], which distinct response each sample is."""
    responses: pd.DataFrame
    """[D]: prompt (number of its instruction), text, length, `JUDGED` (win rates as credits in [0, 1])."""

    @property
    def prompts(self) -> list[Instruction]:
        """[D], the instruction that each distinct response answers."""
        return [self.instructions[number] for number in self.responses.prompt]


def samples_folder(plan: TreatmentRun) -> Path:
    """Where a seed's samples are, for all treatments."""
    return plan.out / "samples" / f"seed-{plan.seed}"


def run_samples(plan: TreatmentRun, on_progress: ProgressFn) -> list[Row]:
    """Draws, judges and stores samples of the SFT policy, for all treatments; one row about them."""
    quiet()
    folder, cell = samples_folder(plan), plan.samples
    folder.mkdir(parents=True, exist_ok=True)
    on_progress(ProgressUpdate(cell, 0))
    policy = agents.LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS)
    config = agents.BestOfNConfig(num_samples=plan.sizes.num_samples, temperature=TEMPERATURE, batch_size=512)
    instructions = plan.instructions("eval")
    numbers: dict[tuple[int, str], int] = {}
    index = np.empty((len(instructions), plan.sizes.num_samples), np.int32)
    for first, part in agents.BestOfN(policy, Constant(), config=config, seed=plan.seed).sample_chunks(instructions):
        for row, texts in enumerate(part.responses, start=first):
            index[row] = [numbers.setdefault((row, text), len(numbers)) for text in texts]
        on_progress(ProgressUpdate(cell, 0.9 * first / len(instructions) * plan.units))
    prompts, responses = zip(*numbers, strict=True)
    judged = evaluate([instructions[i] for i in prompts], responses, judges_of(sandbox.SANDBOX)).values
    columns = {name: judged[name] for name in (*JUDGED, "length")}
    frame = pd.DataFrame({"prompt": prompts, "text": responses, **columns})
    # Texts before the index: what is read back has both or is refused.
    plain = frame.astype(object).where(frame.notna(), None).to_dict("records")
    write_rows(folder / "texts.jsonl.gz", cast(list[Row], plain))
    content = io.BytesIO()
    np.save(content, index, allow_pickle=False)
    write_atomic(folder / "index.npy", content.getvalue())
    text = f"{cell}: {index.size} samples, {len(responses)} of them distinct"
    on_progress(ProgressUpdate(cell, plan.units, text))
    return [{"seed": plan.seed, "num_samples": index.size, "num_distinct": len(responses)}]


def read_samples(plan: TreatmentRun) -> Drawn:
    """The samples that `run_samples` stored; CheckpointError where it is gone or damaged."""
    instructions = plan.instructions("eval")
    folder = samples_folder(plan)
    anew = f"To draw them anew remove {folder} and {cell_file(plan.out, plan.samples)}, and call again."
    try:
        frame = pd.DataFrame(read_rows(folder / "texts.jsonl.gz"))
        responses = frame.astype(dict.fromkeys((*JUDGED, "length"), float))
        index = np.load(folder / "index.npy", allow_pickle=False).astype(np.int64)
        if index.shape != (len(instructions), plan.sizes.num_samples) or index.max() + 1 != len(responses):
            raise ValueError(f"{index.shape} samples of {len(responses)} texts")
    except (DataError, OSError, ValueError, KeyError, EOFError, zlib.error) as error:
        got = f"{folder}: expected the samples of seed {plan.seed}, got {error}"
        raise CheckpointError(f"{got}. {anew}") from error
    return Drawn(instructions, index, responses)


def run_best_of_n(plan: TreatmentRun, on_progress: ProgressFn) -> list[Row]:
    """Asks the treatment's reward about all samples of its seed; rows for n = 1, 2, 4 ... and the largest.

    Stored with each row is what is chosen of the first n samples.
    """
    quiet()
    plan.check_source()
    plan.folder.mkdir(parents=True, exist_ok=True)
    check_settings(plan.folder, plan.settings())
    on_progress(ProgressUpdate(plan.cell, 0))
    drawn = read_samples(plan)
    texts = drawn.responses.text
    verdicts = judge(plan.proxy(), drawn.prompts, list(texts))
    spread = verdicts.details.get(DISAGREEMENT, np.full(len(texts), np.nan))
    measures = drawn.responses[[*JUDGED, "length"]].assign(**{"proxy": verdicts.scores, DISAGREEMENT: spread})
    for row in best_rows(plan, drawn.index, measures):
        best = choose(drawn.index[:, : row["step"]], verdicts.scores)
        values = {str(name): measures[name].to_numpy()[best] for name in measures}
        chosen = Evaluation(tuple(drawn.instructions), tuple(texts.iloc[best]), values)
        write_evaluation(plan, row["step"], [checked(plan, row)], {"eval": chosen.per_response()})
    rows = [{**plan.facts, **read_evaluation(plan, n)["rows"][0]} for n in plan.places]
    on_progress(ProgressUpdate(plan.cell, plan.units, f"{plan.cell}: gold {rows[-1]['gold']:.2f}"))
    return rows


def best_rows(plan: TreatmentRun, index: NDArray[np.int64], measures: pd.DataFrame) -> list[Row]:
    """A row for each n, from the measures [D] of the distinct responses, and which of them each sample [P, N] is.

    Each is the mean over instructions of the unbiased estimator from all samples that the reward has a verdict on
    (`best_of_k`; an instruction with fewer than n of them counts with its best of the largest n that it reaches); the
    KL is the upper bound log n - (n - 1) / n.
    """
    ns, proxies = plan.places, measures["proxy"].to_numpy()[index]
    # Every n is a mean over the same instructions: one with fewer scored samples stays at the largest n it reaches.
    last = np.searchsorted(ns, (~np.isnan(proxies)).sum(axis=1), side="right") - 1
    reached = np.minimum(np.arange(len(ns))[:, None], last.clip(0))
    rows: list[Row] = [{"split": "eval", "step": n, "kl_exact": agents.best_of_n_kl(n)} for n in ns]
    for name in MEASURES[1:]:
        worth: Any = agents.best_of_k(proxies, measures[name].to_numpy()[index], ns)
        for row, values in zip(rows, np.take_along_axis(worth, reached, axis=0), strict=True):
            scored = values[~np.isnan(values)]
            mean = float(scored.mean()) if len(scored) else float("nan")
            row[name] = 100 * mean if name in WIN_RATES else mean
    return rows


def choose(pool: NDArray[np.int64], scores: Array) -> NDArray[np.int64]:
    """[P], the best scored of each row of distinct responses [P, n]; the first of equals."""
    ranked = np.where(np.isnan(scores[pool]), -np.inf, scores[pool])
    best: NDArray[np.int64] = pool[np.arange(len(pool)), ranked.argmax(axis=1)]
    return best
