"""How a served model follows each prompt of the pools: verdicts at the first try, and after retries, time, likings.

The pairs are recorded: a model's response and the reference, half of them preferred by the recorded judge. Each is
asked alone, with the prompt's own settings; half of them in both orders. Answers are in the ledger: the command given
again, or with more pairs, asks what is missing.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from ...annotators.config import AnnotatorConfig, PoolConfig, load_pool, load_prompt
from ...annotators.pool import AnnotatorPool, check_server
from ...annotators.prompts import Item
from ...data import RecordedDataset
from ...data.load import recorded_dataset
from ...errors import DataError
from ...llm.ledger import operations as sql
from ...seeding import keyed_rng
from ...statistics import interval, mean_known
from ...terminal import make_bar
from ..harness.page import read_table
from ..harness.report import Table, text_table
from ..harness.study import Row, write_csv
from .judges import make_row, rows_of

FILE: Final = "served.csv"
LEVEL: Final = "served"
POOLS: Final = ("alpaca_farm", "greedy")
SHARES: Final = {
    "first_try": "verdict at the first try",
    "parsed": "after retries",
    "prefers_first": "chooses the first shown",
    "both_orders_agree": "the same in both orders",
    "agreement_with_recorded": "agrees with the recorded judge",
}
"""Figure -> its column."""
MEANS: Final = ("seconds", "prompt_tokens", "reply_tokens")
"""Of a request, a retry counted as one."""
COLUMNS: Final = ("judge", "figure", "value", "low", "high", "n", "level", "model", "in_flight")


Pair = tuple[Item, Item, bool]
"""What is shown, the same in the other order, and whether the recorded judge prefers the one shown second at first."""


def recorded_pairs(dataset: RecordedDataset, num: int, max_characters: int) -> list[Pair]:
    """`num` pairs, each of another instruction: a fixed order, of which fewer are the beginning.

    By turns the recorded judge prefers the reference or the model, and the reference is shown first or second: so a
    judge that always takes the first, the reference, or the model agrees with half.

    Raises:
        DataError: There are not as many.
    """
    instructions, references = dataset.instructions("eval"), dataset.references("eval")
    found = [
        (i, credit, output)
        for generator in dataset.judged
        for i, (credit, output) in enumerate(
            zip(dataset.judgements(generator).tolist(), dataset.outputs(generator), strict=True)
        )
        if credit in (0, 1) and len(instructions[i]) + len(references[i]) + len(output) <= max_characters
    ]
    order = [found[place] for place in keyed_rng(0, "served pairs").permutation(len(found)).tolist()]
    by_verdict = [iter([each for each in order if each[1] == verdict]) for verdict in (0, 1)]
    used: set[int] = set()
    pairs: list[Pair] = []
    for number in range(num):
        chosen = next((each for each in by_verdict[number % 2] if each[0] not in used), None)
        if chosen is None:
            wanted = f"{num} pairs of at most {max_characters} characters"
            raise DataError(f"{dataset.path}: expected {wanted}, got {number}. Give fewer --pairs or more characters.")
        i, credit, output = chosen
        used.add(i)
        shown = Item(str(instructions[i]), references[i], output)
        swapped = Item(shown.instruction, output, references[i])
        pairs.append((shown, swapped, credit == 1) if number // 2 % 2 else (swapped, shown, credit == 0))
    return pairs


def annotators(prompts: Sequence[str]) -> list[AnnotatorConfig]:
    """The first annotator of each prompt, with its settings, to be asked about one pair alone."""
    every = [each for pool in POOLS for each in load_pool(pool).annotators]
    by_prompt = {each.prompt: each for each in reversed(every)}
    if unknown := set(prompts) - by_prompt.keys():
        raise DataError(
            f"--prompts: expected some of {', '.join(sorted(by_prompt))}, got {', '.join(sorted(unknown))}."
        )
    return [by_prompt[name].model_copy(update={"batch_size": 1}) for name in sorted(prompts or by_prompt)]


def prompt_rows(annotator: AnnotatorConfig, pairs: Sequence[Pair], keywords: Mapping[str, Any]) -> list[Row]:
    """Asks by one prompt; its rows.

    Raises:
        APIError: The server refused for good, or stopped answering; answers so far are kept.
    """
    bar = make_bar(len(pairs) + len(pairs) // 2, annotator.prompt)
    pool = AnnotatorPool(
        PoolConfig(name="served", annotators=(annotator,)),
        **{"max_concurrency": 1, "attempt_timeout_s": 300, "deadline_s": 900, **keywords},
        on_progress=lambda progress: bar.update(progress.done - bar.n),
    )
    pool.draws_order = False
    both = pairs[: len(pairs) // 2]
    items = [shown for shown, _, _ in pairs] + [swapped for _, swapped, _ in both]
    with bar:
        scores = pool.judge(*zip(*items, strict=True)).scores
    served = pool.served[0]
    keys = [served.question(0, item).key for item in items]
    stored = pool.ledger.do(sql.lookup, keys).result()
    tries = np.array([stored[key].tries if key in stored else 0 for key in keys])
    requests = [served.request([item], n).key for item, num in zip(items, tries, strict=True) for n in range(num)]
    known, second = ~np.isnan(scores), scores > 0.5
    wins = np.array([wins for *_, wins in pairs] + [not wins for *_, wins in both])
    by_question = {
        "first_try": known & (tries == 1),
        "parsed": known,
        "prefers_first": np.where(known, ~second, np.nan),
        "agreement_with_recorded": np.where(known, second == wins, np.nan),
    }
    rest = np.full(len(pairs) - len(both), np.nan)
    twice = {
        name: np.array([values[: len(pairs)], [*values[len(pairs) :], *rest]], np.float64)
        for name, values in by_question.items()
    }
    answered = known[: len(both)] & known[len(pairs) :]
    same = np.where(answered, second[: len(both)] != second[len(pairs) :], np.nan)
    figures = {name: mean_known(values) for name, values in twice.items()} | {"both_orders_agree": same}
    rows = rows_of(annotator.prompt, [figures], LEVEL)
    timings = np.array(pool.ledger.do(sql.timings, requests).result(), np.float64).reshape(-1, len(MEANS))
    timed = [(name, values[~np.isnan(values)]) for name, values in zip(MEANS, timings.T, strict=True)]
    return rows + [make_row(annotator.prompt, name, interval(values), LEVEL) for name, values in timed if len(values)]


def table(rows: pd.DataFrame) -> Table:
    """A line for each prompt."""
    cells = {(row.judge, row.figure): row for row in rows.itertuples()}
    by_prompt = {each.prompt: each for each in annotators(())}
    lines = []
    for prompt in rows.judge.unique():
        mine = [cells.get((prompt, figure)) for figure in SHARES]
        shares = [f"{row.value:.2f} ({row.low:.2f} to {row.high:.2f}; {row.n})" if row else "–" for row in mine]
        seconds, asked, said = (
            f"{cells[prompt, name].value:.1f}" if (prompt, name) in cells else "–" for name in MEANS
        )
        tokens = f"{asked.split('.')[0]} + {said.split('.')[0]}"
        lines.append((prompt, load_prompt(prompt).format, str(by_prompt[prompt].max_tokens), *shares, seconds, tokens))
    columns = ("prompt", "reply", "tokens at most", *SHARES.values(), "seconds a request", "tokens, read + written")
    who, flight = (", ".join(map(str, rows[name].unique())) for name in ("model", "in_flight"))
    caption = (
        f"{who}, {flight} requests in flight; a retry counts as one. In brackets the 95 % interval and the number of"
    )
    caption += " pairs: those without a verdict count in the first two shares alone."
    return Table(columns, lines, caption, "A small real model, by prompt")


def finding(rows: pd.DataFrame) -> str:
    """The table in a sentence."""
    values = rows.pivot(index="judge", columns="figure", values="value")
    first, parsed = values.first_try, values.parsed
    ends = [f"{100 * share(column):.0f} %" for column in (first, parsed) for share in (pd.Series.min, pd.Series.max)]
    who = ", ".join(rows.model.unique())
    text = f"{who}, asked by {len(values)} prompts: a verdict at the first try on {ends[0]} ({first.idxmin()}) to"
    text += f" {ends[1]} ({first.idxmax()}) of the pairs, after retries on {ends[2]} to {ends[3]}"
    above = rows[(rows.figure == "agreement_with_recorded") & (rows.low > 0.5)].judge
    return f"{text}. Above chance agree with the recorded judge: {', '.join(above) or 'those of none'}."


def run(spec: str, folder: str, num: int, max_characters: int, prompts: Sequence[str], *, out: Path) -> int:
    """Asks by one prompt after the other, and writes the table after each; returns the exit status.

    Raises:
        DataError: `spec` is no JSON object of a pool's keywords with a model, or the folder has too few such pairs.
        AlpacaFarmError: The server, the ledger or its budget ended it; answers so far are kept.
    """
    try:
        keywords = json.loads(spec)
    except ValueError:
        keywords = None
    if not isinstance(keywords, Mapping) or "model" not in keywords:
        raise DataError(f'--served: expected {{"model": NAME, "base_url": URL}}, got {spec}.')
    check_server({"pool": "served", **keywords})
    pairs = recorded_pairs(recorded_dataset(folder), num, max_characters)
    path = out / FILE
    out.mkdir(parents=True, exist_ok=True)
    who = {"model": Path(str(keywords["model"])).name, "in_flight": keywords.get("max_concurrency", 1)}
    for annotator in annotators(prompts):
        new = [{**row, **who} for row in prompt_rows(annotator, pairs, keywords)]
        old = read_table(path).to_dict("records") if path.exists() else []
        rows: list[Any] = [*(row for row in old if row["judge"] != annotator.prompt), *new]
        kept = [{name: None if row[name] != row[name] else row[name] for name in COLUMNS} for row in rows]
        write_csv(path, sorted(kept, key=lambda row: str(row["judge"])))
    print(text_table(table(read_table(path))), f"written: {path}", sep="\n")
    return 0
