"""Runs the cells of the over-optimization study: reward models, samples of the SFT policy, policies and best-of-n.

All treatments of a seed see the same prompts, the same samples and the same draws (common random numbers).
"""

import io
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ... import agents, sandbox
from ...agents.evaluation import answer, exact_response_kl
from ...data.files import write_atomic
from ...errors import CheckpointError, DataError
from ...folders import hash_model
from ...instructions import Instruction, Preference
from ...oracles.base import Constant, RewardOracle, judge
from ...sandbox.dataset import Sandbox, label, read_rows, write_rows
from ...seeding import keyed_rng
from ..experiment.evaluation import WIN_RATES, evaluate, judges_of
from ..experiment.reward_models import LAST_FILE, MAX_RESPONSE_TOKENS, fit, fresh_pairs, hits, predicted, reliability
from ..harness import stored
from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.study import Row
from .curves import COLUMNS, MEASURES, place_text
from .plans import Plan
from .policies import CONFIGS, evaluated, make_agent, place_of
from .treatments import DISAGREEMENT, SCALE_SAMPLES, SeedInputs

TEMPERATURE: Final = 1.0
"""Of all responses that are measured: that of PPO's training, at which its KL is penalised."""
JUDGED = ("gold", "win_rate_simulated", "win_rate_human")
DATA: Final = cast(Sandbox, sandbox.SANDBOX)

Array = NDArray[np.float64]
ShareFn = Callable[[float], None]  # reports the share of a cell that is done


def run_cell(plan: Plan, on_progress: ProgressFn) -> list[Row]:
    """Runs a cell in its folder and returns its rows: of a method those of `COLUMNS`, one an evaluation."""
    quiet()
    plan.folder.mkdir(parents=True, exist_ok=True)
    if plan.spec:
        members = {folder.name: hash_model(folder) for folder in inputs_of(plan).reward_models}
        settings = {"treatment": plan.treatment.settings(), "sizes": asdict(plan.sizes), "reward_models": members}
        config: dict[str, Any] = {plan.kind: asdict(CONFIGS[plan.kind](plan.sizes))} if plan.kind in CONFIGS else {}
        stored.check_settings(plan.folder, settings | config)
    runners = {"reward_model": run_reward_model, "samples": run_samples, "best_of_n": run_best_of_n}
    run = runners.get(plan.kind, run_policy)
    rows, text = run(plan, lambda share: on_progress(ProgressUpdate(plan.cell, int(share * plan.units))))
    on_progress(ProgressUpdate(plan.cell, plan.units, f"{plan.cell}: {text}"))
    return rows


def inputs_of(plan: Plan) -> SeedInputs:
    """What the plan's treatment makes its reward from; DataError where a member has not been trained."""
    members = plan.reward_models()
    if missing := [model for model in members if not (model.model / LAST_FILE).is_file()]:
        cells = ", ".join(str(stored.cell_file(model.out, model.cell)) for model in missing)
        raise DataError(
            f"{plan.cell}: expected its reward models, found none for: {'; '.join(model.cell for model in missing)}. "
            f"To train them anew remove {cells} (what there is of it) and call again."
        )
    return SeedInputs(plan.seed, tuple(model.model for model in members))


def run_reward_model(plan: Plan, on_share: ShareFn) -> tuple[list[Row], str]:
    """Trains the reward model unless it is there, and measures it; one row.

    0 is the mean score of the SFT policy's answers, 1 their standard deviation within an instruction: PPO and the
    choice among n samples are moved by differences within an instruction only, so one KL penalty pulls equally hard
    against any reward model (the mean or minimum of three moves a little less: 0.9 to 1).
    """
    on_share(0)
    preferences = labelled(plan)
    if not (plan.model / LAST_FILE).is_file():
        fit(
            trunk_of(plan),
            preferences,
            plan.model,
            val=DATA.instructions("val")[: plan.sizes.num_val],
            config=replace(agents.RewardModelingConfig.sandbox(), keep_checkpoints=1),
            seed=training_seed(plan),
            out=plan.folder,
            sft=sandbox.POLICY,
            num_samples=SCALE_SAMPLES,
            on_progress=lambda share: on_share(0.8 * share),
        )
    row = measure(plan, len(preferences))
    return [row], f"{row['accuracy_gold']:.1%} against gold, {row['accuracy_judge']:.1%} against its judge"


def measure(plan: Plan, num_trained: int) -> Row:
    """The reward model on fresh pairs, the same for all of a seed.

    Accuracies are shares of the pairs: against gold, and against the labels of its own judge, noise included;
    `calibration_error` is the mean distance between P(b preferred) and those labels, by bins of confidence.
    """
    pairs = fresh_pairs(DATA, sandbox.POLICY, plan.seed, plan.sizes.num_fresh)
    chance = predicted(plan.model, pairs)
    verdicts = plan.labels.annotator(plan.seed).compare(pairs.instructions, pairs.a, pairs.b)
    bins = reliability("reward_model", chance, plan.labels.name, verdicts)
    error = sum(row["n"] * abs(row["accuracy"] - row["confidence"]) for row in bins) / sum(row["n"] for row in bins)
    return {
        **asdict(plan.labels),
        "member": plan.member,
        "seed": plan.seed,
        "num_trained": num_trained,
        "num_pairs": len(pairs.a),
        "accuracy_gold": float(hits(chance, (pairs.gap > 0).astype(np.float64)).mean()),
        "accuracy_judge": float(hits(chance, verdicts).mean()),
        "calibration_error": float(error),
    }


def training_seed(plan: Plan) -> int:
    """Of the head's start and the order of the pairs: the same for all labels of a seed."""
    return plan.seed if plan.member == 0 else int(keyed_rng(plan.seed, "member", plan.member).integers(2**31))


def labelled(plan: Plan) -> tuple[Preference, ...]:
    """The pairs of SFT samples as the plan's judge labels them, less the ties; the seed is the annotators' too."""
    num = plan.labels.num_labels
    return label(DATA.instructions("preference")[:num], DATA.pairs()[:num], plan.labels.annotator(plan.seed))


def trunk_of(plan: Plan) -> Path:
    """Folder of the language model that the reward model starts from; one with fewer layers is made on the way."""
    trunk, layers = Path(plan.labels.trunk or sandbox.POLICY), plan.labels.layers
    if layers is None:
        return trunk
    language_model = agents.LanguageModel.from_pretrained(trunk)
    model: Any = language_model.model
    if layers > len(model.model.layers):
        raise DataError(f"layers: expected at most the {len(model.model.layers)} of {trunk}, got {layers}.")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    language_model.save(plan.folder / "trunk")
    return plan.folder / "trunk"


@dataclass(frozen=True, eq=False)
class Samples:
    """N samples of each of P instructions, D of them distinct."""

    instructions: list[Instruction]
    index: NDArray[np.int64]
    """[P, N], which distinct response each sample is."""
    responses: pd.DataFrame
    """[D]: prompt (number of its instruction), text, length, `JUDGED` (win rates as credits in [0, 1])."""

    @property
    def asked(self) -> list[Instruction]:
        """[D], the instruction that each distinct response answers."""
        return [self.instructions[number] for number in self.responses.prompt]


def run_samples(plan: Plan, on_share: ShareFn) -> tuple[list[Row], str]:
    """Draws, judges and stores samples of the SFT policy, for all treatments; one row about them.

    A policy of the sandbox says many things twice: each distinct response is stored and judged once.
    """
    on_share(0)
    policy = agents.LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS)
    config = agents.BestOfNConfig(num_samples=plan.sizes.num_samples, temperature=TEMPERATURE, batch_size=512)
    instructions = plan.sizes.instructions(plan.sizes.num_prompts)
    numbers: dict[tuple[int, str], int] = {}
    index = np.empty((len(instructions), plan.sizes.num_samples), np.int32)
    for first, part in agents.BestOfN(policy, Constant(), config=config, seed=plan.seed).sample_chunks(instructions):
        for row, texts in enumerate(part.responses, start=first):
            index[row] = [numbers.setdefault((row, text), len(numbers)) for text in texts]
        on_share(0.9 * first / len(instructions))
    prompts, responses = zip(*numbers, strict=True)
    found = evaluate([instructions[i] for i in prompts], responses, judges_of(DATA, proxy=None))
    judged = {name: found.scores[name] for name in JUDGED}
    frame = pd.DataFrame({"prompt": prompts, "text": responses, **judged, "length": found.length})
    write_rows(plan.folder / "texts.jsonl.gz", cast(list[Row], jsonable(frame).to_dict("records")))
    content = io.BytesIO()
    np.save(content, index, allow_pickle=False)
    write_atomic(plan.folder / "index.npy", content.getvalue())
    about = {"seed": plan.seed, "num_samples": index.size, "num_distinct": len(responses)}
    return [about], f"{index.size} samples, {len(responses)} of them distinct"


def read_samples(plan: Plan) -> Samples:
    """What `run_samples` stored; CheckpointError where it is gone or damaged."""
    instructions = plan.sizes.instructions(plan.sizes.num_prompts)
    anew = f"To draw them anew remove {plan.folder} and {stored.cell_file(plan.out, plan.cell)}, and call again."
    try:
        frame = pd.DataFrame(read_rows(plan.folder / "texts.jsonl.gz"))
        responses = frame.astype(dict.fromkeys((*JUDGED, "length"), float))
        index = np.load(plan.folder / "index.npy", allow_pickle=False).astype(np.int64)
        if index.shape != (len(instructions), plan.sizes.num_samples) or index.max() + 1 != len(responses):
            raise ValueError(f"{index.shape} samples of {len(responses)} texts")
    except (DataError, OSError, ValueError, KeyError, EOFError, zlib.error) as error:
        found = f"{plan.folder}: expected the samples of seed {plan.seed}, got {error}"
        raise CheckpointError(f"{found}. {anew}") from error
    return Samples(instructions, index, responses)


def run_policy(plan: Plan, on_share: ShareFn) -> tuple[list[Row], str]:
    """Trains past the peak of gold, and evaluates now and then on one set of prompts.

    Each evaluation is a file, and agents keep checkpoints: a run that was interrupted continues with equal numbers. A
    policy is evaluated before the next step is made, so a resumed run may lack the evaluation of where it is only.
    """
    inputs, places = inputs_of(plan), evaluated(plan.kind, plan.sizes)
    agent = make_agent(plan, inputs, lambda: labelled(plan.reward_models()[0]))
    proxy = plan.treatment.proxy(inputs)

    def complete(place: int) -> bool:
        """Evaluates the policy if that is due and not done; whether there is more to train."""
        on_share(place / (places[-1] + 1))
        if place in places and not plan.evaluation_file(place).exists():
            evaluate_policy(plan, agent.policy, proxy, place)
        return place < places[-1]

    if complete(place_of(agent)):
        for _ in agent.updates():
            if not complete(place_of(agent)):
                break
        complete(place_of(agent))
    rows = [read_evaluation(plan, place)["row"] for place in places]
    return rows, describe(rows)


def evaluate_policy(plan: Plan, policy: agents.LanguageModel, proxy: RewardOracle, place: int) -> None:
    """Answers the study's instructions of eval, with equal draws at every place and treatment of a seed; stores it."""
    chosen = plan.sizes.instructions(plan.sizes.num_eval)
    rollouts = answer(policy, chosen, seed=plan.seed, split="eval", temperature=TEMPERATURE)
    found = evaluate(chosen, rollouts.texts, judges_of(DATA, proxy=None), finished=rollouts.finished.cpu().numpy())
    proxies, spread = ask(proxy, chosen, rollouts.texts)
    found = replace(found, scores={**found.scores, "proxy": proxies})
    kl = exact_response_kl(policy, rollouts, TEMPERATURE)
    means = {**found.means(), DISAGREEMENT: known_mean(spread), "kl_exact": math.fsum(kl.tolist()) / len(kl)}
    columns = {**found.scores, DISAGREEMENT: spread, "finished": found.finished, "kl_exact": kl}
    write_evaluation(plan, place, make_row(plan, place, means), chosen, rollouts.texts, pd.DataFrame(columns))


def run_best_of_n(plan: Plan, on_share: ShareFn) -> tuple[list[Row], str]:
    """Asks the treatment's reward about all samples of its seed; rows for n = 1, 2, 4 ... and the largest.

    Stored with each row is what is chosen of the first n samples.
    """
    on_share(0)
    samples = read_samples(Plan("samples", plan.seed, plan.out, plan.sizes))
    responses = samples.responses
    proxies, spread = ask(plan.treatment.proxy(inputs_of(plan)), samples.asked, list(responses.text))
    judged = responses[[*JUDGED, "length"]]
    measures = pd.DataFrame({"proxy": proxies, **judged, DISAGREEMENT: spread})
    rows = best_rows(plan, samples.index, measures)
    for n, row in zip(plan.sizes.ns, rows, strict=True):
        best = choose(samples.index[:, :n], proxies)
        write_evaluation(plan, n, row, samples.instructions, list(responses.text.iloc[best]), measures.iloc[best])
    return rows, describe(rows)


def best_rows(plan: Plan, index: NDArray[np.int64], measures: pd.DataFrame) -> list[Row]:
    """The rows, from the measures [D] of the distinct responses, and which of them each sample [P, N] is.

    Each is the mean over instructions of the unbiased estimator from all samples that the reward has a verdict on
    (`best_of_k`; an instruction with fewer than n of them counts with its best of the largest n that it reaches); the
    KL is the upper bound log n - (n - 1) / n.
    """
    ns, proxies = plan.sizes.ns, measures["proxy"].to_numpy()[index]
    # Every n is a mean over the same instructions: one with fewer scored samples stays at the largest n it reaches.
    last = np.searchsorted(ns, (~np.isnan(proxies)).sum(axis=1), side="right") - 1
    places = np.minimum(np.arange(len(ns))[:, None], last.clip(0))
    means: list[dict[str, float | None]] = [{"kl_exact": agents.best_of_n_kl(n)} for n in ns]
    for name in MEASURES[1:]:
        worth = agents.best_of_k(proxies, measures[name].to_numpy()[index], ns)
        for row, values in zip(means, np.take_along_axis(worth, places, axis=0), strict=True):
            mean = known_mean(values)
            row[name] = 100 * mean if mean is not None and name in WIN_RATES else mean
    return [make_row(plan, n, row) for n, row in zip(ns, means, strict=True)]


def choose(pool: NDArray[np.int64], scores: Array) -> NDArray[np.int64]:
    """[P], the best scored of each row of distinct responses [P, n]; the first of equals."""
    known = np.where(np.isnan(scores[pool]), -np.inf, scores[pool])
    best: NDArray[np.int64] = pool[np.arange(len(pool)), known.argmax(axis=1)]
    return best


def ask(proxy: RewardOracle, instructions: Sequence[str], responses: Sequence[str]) -> tuple[Array, Array]:
    """The proxy's scores [B], and how far an ensemble's members are apart [B] (NaN where one model decides)."""
    verdicts = judge(proxy, instructions, responses)
    spread = verdicts.details.get(DISAGREEMENT, np.full(len(responses), np.nan))
    return verdicts.scores, np.asarray(spread, np.float64)


def known_mean(values: Array) -> float | None:
    """Mean of what is known; None where nothing is."""
    known = values[~np.isnan(values)]
    return math.fsum(known.tolist()) / len(known) if len(known) else None


def jsonable(frame: pd.DataFrame) -> pd.DataFrame:
    """Plain values, None for NaN."""
    return frame.astype(object).where(frame.notna(), None)


def make_row(plan: Plan, place: int, means: Mapping[str, float | None]) -> Row:
    """A row of `COLUMNS`. Without a finite KL, proxy and gold the cell fails, and not the report of all others."""
    step, n = (None, place) if plan.kind == "best_of_n" else (place, None)
    facts = {"treatment": plan.treatment.name, "method": plan.kind, "seed": plan.seed, "step": step, "n": n}
    row: Row = {name: {**means, **facts}[name] for name in COLUMNS}
    for name in ("kl_exact", "proxy", "gold"):
        if row[name] is None or not math.isfinite(row[name]):
            where = place_text(plan.kind, place)
            raise DataError(f"{plan.cell}, {where}: expected a {name} of one response at least, got none.")
    return row


def write_evaluation(
    plan: Plan, place: int, row: Row, instructions: Sequence[str], responses: Sequence[str], values: pd.DataFrame
) -> None:
    """Stores the row of an evaluation with its B responses and the values of each, [B]."""
    texts = {"instructions": list(instructions), "responses": list(responses)}
    plan.evaluation_file(place).parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"row": row, **texts, **jsonable(values).to_dict("list")})
    write_atomic(plan.evaluation_file(place), content + "\n")


def read_evaluation(plan: Plan, place: int) -> dict[str, Any]:
    """What `write_evaluation` stored; CheckpointError where it is gone or damaged."""
    cell = stored.cell_file(plan.out, plan.cell)
    remedy = f"To run the cell anew remove {plan.folder} and, if it is there, {cell}, and call again."
    shape = {"row": dict, "responses": list}
    return stored.read_stored(plan.evaluation_file(place), *shape, shape=shape, remedy=remedy)


def describe(rows: Sequence[Row]) -> str:
    """One line about a finished run: gold at its start, peak and end, proxy, KL."""
    first, peak, last = rows[0], max(rows, key=lambda row: float(row["gold"])), rows[-1]
    where = place_text(peak["method"], peak["step"] if peak["n"] is None else peak["n"])
    gold = f"gold {first['gold']:.2f}, peak {peak['gold']:.2f} at {where}, end {last['gold']:.2f}"
    return f"{gold}; proxy {first['proxy']:.2f} to {last['proxy']:.2f}; KL {last['kl_exact']:.2f}"
