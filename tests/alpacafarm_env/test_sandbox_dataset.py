"""The sandbox's data and shipped files: sizes, no overlap, stored texts equal the generated ones, hashes, weights."""

import copy
import gzip
import hashlib
import json
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from safetensors import safe_open

from alpacafarm_env import sandbox
from alpacafarm_env.data import load_dataset
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.sandbox import SANDBOX, dataset, tasks
from alpacafarm_env.sandbox.dataset import ASSETS, EVAL_SOURCES, SIZES, Sandbox, label, read_rows, write_rows

SPLITS = tuple(SIZES)


@pytest.fixture(scope="module")
def generated():
    return dataset.generate()


def test_sizes_are_the_papers():
    assert SIZES == {"sft": 10_000, "preference": 10_000, "unlabeled": 20_000, "val": 2_000, "eval": 805}
    assert EVAL_SOURCES == {"selfinstruct": 252, "oasst": 188, "helpful_base": 129, "vicuna": 80, "koala": 156}
    assert {split: len(SANDBOX.instructions(split)) for split in SANDBOX.splits} == SIZES
    assert Counter(row.source for row in SANDBOX.instructions("eval")) == EVAL_SOURCES


def test_splits_are_disjoint_and_without_duplicates():
    texts = {split: set(map(str, SANDBOX.instructions(split))) for split in SPLITS}
    assert {split: len(rows) for split, rows in texts.items()} == SIZES
    for one, other in combinations(SPLITS, 2):
        assert not texts[one] & texts[other], (one, other)


@pytest.mark.parametrize("split", SPLITS)
def test_every_instruction_can_be_read(split):
    rows = SANDBOX.instructions(split)
    read = [tasks.read(str(row)) for row in rows]
    assert None not in read
    assert {task.verb for task in read} == {template.verb for template in tasks.TEMPLATES}
    assert [row.id for row in rows] == list(range(len(rows)))
    assert {row.split_name for row in rows} == {split}


@pytest.mark.parametrize("split", SPLITS)
def test_a_quarter_has_an_input(split):
    share = np.mean([bool(row.input) for row in SANDBOX.instructions(split)])
    assert share == pytest.approx(0.25, abs=0.02 if split != "eval" else 0.06)


def test_sources_of_eval_differ_in_what_they_ask():
    rows = SANDBOX.instructions("eval")
    verbs = {s: Counter(tasks.read(str(row)).verb for row in rows if row.source == s) for s in EVAL_SOURCES}
    assert len({counts.most_common(1)[0][0] for counts in verbs.values()}) >= 3
    assert not any(row.input for row in rows if row.source == "vicuna")


@pytest.mark.parametrize("split", SPLITS)
def test_stored_instructions_are_the_generated_ones(split, generated):
    stored = SANDBOX.instructions(split)
    assert list(stored) == generated[split]
    fields = ("instruction", "input", "id", "source", "split_name")
    assert all(getattr(a, f) == getattr(b, f) for a, b in zip(stored, generated[split], strict=True) for f in fields)


def test_another_seed_gives_other_texts():
    small = {"val": 50}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "SIZES", small)
        assert dataset.generate(1) == dataset.generate(1) != dataset.generate(2)


def test_stored_references_are_the_written_ones():
    rows = SANDBOX.instructions("eval")
    assert SANDBOX.references("eval") == tuple(dataset.reference(row) for row in rows)
    stored = read_rows(ASSETS / "data" / "davinci003_stand_in.jsonl.gz")
    assert [(row["instruction"], row["input"]) for row in stored] == [(row.instruction, row.input) for row in rows]


def test_references_and_demonstrations_of_other_splits():
    rows = SANDBOX.instructions("val")
    references = SANDBOX.references("val")
    assert len(references) == len(rows)
    assert references[17] == dataset.reference(rows[17])
    assert SANDBOX.references("val") is references  # written once
    demonstrations = SANDBOX.demonstrations("val")
    assert [d.instruction for d in demonstrations] == list(rows)
    assert demonstrations[17].response == dataset.demonstration(rows[17])
    assert demonstrations[17].response != dataset.demonstration(rows[17], seed=1)


def test_preferences_are_the_judges_verdicts_on_the_pairs():
    rows, pairs = SANDBOX.instructions("preference"), SANDBOX.pairs()
    assert len(pairs) == len(rows)
    a, b = zip(*pairs, strict=True)
    verdicts = sandbox.judge("sim_ann").compare(rows, a, b)
    preferences = SANDBOX.preferences()
    assert len(preferences) == np.sum(verdicts != 0.5) > 0.8 * len(rows)
    assert all(p.responses[0] != p.responses[1] for p in preferences)
    labelled = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict != 0.5]
    assert [p.instruction for p in preferences] == labelled
    assert [p.preference for p in preferences] == [2 if v == 1 else 1 for v in verdicts if v != 0.5]


def test_label_leaves_out_ties_and_pairs_without_a_verdict():
    class Fixed:
        name = "fixed"

        def compare(self, instructions, a, b):
            return np.array([1.0, np.nan, 0.0, 0.5])

    rows = SANDBOX.instructions("val")[:4]
    labels = label(rows, [("x", "y")] * 4, Fixed())
    assert [(p.instruction, p.preference) for p in labels] == [(rows[0], 2), (rows[2], 1)]


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(UnknownNameError, match="Unknown split 'evl'. Did you mean 'eval'?"):
        SANDBOX.instructions("evl")
    for method in (SANDBOX.references, SANDBOX.demonstrations, SANDBOX.pairs, SANDBOX.preferences):
        with pytest.raises(UnknownNameError, match="Unknown split 'evl'"):
            method("evl")
    with pytest.raises(DataError, match="Only the split 'preference' has pairs of responses, got 'val'"):
        SANDBOX.pairs("val")
    with pytest.raises(DataError, match=r"val.jsonl.gz, found none. Reinstall the package, or rebuild it"):
        Sandbox(tmp_path).instructions("val")


def test_the_dataset_by_name():
    assert load_dataset("sandbox") is SANDBOX
    assert copy.deepcopy(SANDBOX) is SANDBOX
    assert (SANDBOX.name, SANDBOX.level) == ("sandbox", "sandbox")


def test_rows_survive_a_file_and_equal_rows_give_equal_bytes(tmp_path):
    """Whatever a policy may sample: every kind of line break stays within its row."""
    rows = [{"output": text} for text in ("", "a\nb", "\r\n", "\u2028\u2029\x85\x0b\x0c\x1c", "日本🦁", '"\\')]
    for name in ("one", "other"):
        write_rows(tmp_path / name / "rows.jsonl.gz", rows)
    assert read_rows(tmp_path / "one" / "rows.jsonl.gz") == rows
    assert (tmp_path / "one" / "rows.jsonl.gz").read_bytes() == (tmp_path / "other" / "rows.jsonl.gz").read_bytes()
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["rows.jsonl.gz"]
    assert len(gzip.decompress((tmp_path / "one" / "rows.jsonl.gz").read_bytes()).decode().split("\n")) == len(rows) + 1


# -------------------------------------------------------------------------------------------------------- shipped files


def shipped():
    return {path.relative_to(ASSETS).as_posix(): path for path in ASSETS.rglob("*") if path.is_file()}


def test_manifest_names_every_file_by_its_hash():
    manifest = json.loads((ASSETS / "manifest.json").read_text())
    files = {name: path for name, path in shipped().items() if name != "manifest.json"}
    assert manifest["files"] == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    assert manifest["seed"] == dataset.SEED
    assert manifest["sizes"] == SIZES
    assert manifest["command"].startswith("python -m alpacafarm_env.benchmarks.build_sandbox")
    assert manifest["versions"]["torch"]


def test_assets_are_small():
    size = sum(path.stat().st_size for path in shipped().values())
    assert size < 8 * 10**6, f"{size / 10**6:.1f} MB"


def test_nothing_shipped_is_pickled():
    suffixes = {"".join(path.suffixes) for path in shipped().values()}
    assert suffixes <= {".json", ".jsonl.gz", ".safetensors", ".jinja"}


@pytest.mark.parametrize(
    "folder", [sandbox.POLICY, sandbox.REWARD_MODEL, sandbox.REWARD_MODEL_CLEAN], ids=lambda f: f.name
)
def test_weights_are_safetensors_of_a_tiny_llama(folder):
    with safe_open(folder / "model.safetensors", framework="np") as weights:
        count = sum(int(np.prod(weights.get_slice(name).get_shape())) for name in weights.keys())  # noqa: SIM118
    assert 300_000 <= count <= 1_500_000
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (folder / "prompt_template.json").is_file()
