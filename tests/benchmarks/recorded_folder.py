"""A made-up folder of recorded judgements, in which longer responses win, and a second judge."""

import gzip
import json

import numpy as np

from alpacafarm_env.data.recorded import reference_digest

NUM = 48
MODELS = 9


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def words(rng, num):
    return " ".join(rng.choice(["red", "green", "blue", "fox", "runs,", "well.", "1."], num))


def make_folder(path, *, other=True):
    """Writes the folder and returns it; without `other` there is no second judge."""
    rng = np.random.default_rng(0)
    asked = [{"index": i, "instruction": f"Question {i}", "input": ""} for i in range(NUM)]
    references = [words(rng, 12) for _ in asked]
    write_lines(path / "eval_instructions.jsonl.gz", asked)
    rows = [{**row, "output": text, "generator": "ref"} for row, text in zip(asked, references, strict=True)]
    write_lines(path / "davinci003.jsonl.gz", rows)
    first, second = [], []
    for model in range(MODELS + 3):
        name, texts = f"model_{model}", [words(rng, int(rng.integers(2, 18 + model))) for _ in asked]
        rows = [{**row, "output": text, "generator": name} for row, text in zip(asked, texts, strict=True)]
        write_lines(path / "outputs" / f"outputs_{name}.jsonl.gz", rows)
        pairs = zip(asked, texts, references, strict=True)
        gaps = [(row["index"], len(text) - len(other) + rng.normal(0, 20)) for row, text, other in pairs]
        verdicts = [{"index": index, "generator": name, "preference": float(gap > 0)} for index, gap in gaps]
        if model < MODELS:
            first += [{**row, "preference": None if row["index"] == model else row["preference"]} for row in verdicts]
        if model > MODELS - 4:
            second += verdicts
    write_lines(path / "preferences_my_judge.jsonl.gz", first)
    if other:
        write_lines(path / "extras" / "preferences_claude.jsonl.gz", second)
    digest = reference_digest([row["instruction"] for row in asked], references)
    (path / "recorded.json").write_text(json.dumps({"reference_sha256": digest}), encoding="utf-8")
    return path
