"""The sandbox as a dataset: what its splits hold, and tasks that are read from an instruction's text alone."""

import gzip
import hashlib
import json
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from alpacafarm_env import sandbox
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.sandbox import SANDBOX, dataset, gold, tasks, world, writers
from alpacafarm_env.sandbox.dataset import ASSETS, EVAL_SOURCES, SIZES, Sandbox, label, read_rows, write_rows
from alpacafarm_env.sandbox.tokenizer import build


def test_splits_have_the_papers_sizes_and_no_duplicates():
    assert SIZES == {"sft": 10_000, "preference": 10_000, "unlabeled": 20_000, "val": 2_000, "eval": 805}
    for split, size in SIZES.items():
        rows = SANDBOX.instructions(split)
        assert [row.id for row in rows] == list(range(size))
        assert {row.split_name for row in rows} == {split}
        share = np.mean([bool(row.input) for row in rows])
        assert share == pytest.approx(0.25, abs=0.06 if split == "eval" else 0.02)
    assert len({str(row) for split in SIZES for row in SANDBOX.instructions(split)}) == sum(SIZES.values())


def test_eval_sources_have_the_papers_sizes():
    rows = SANDBOX.instructions("eval")
    assert EVAL_SOURCES == {"selfinstruct": 252, "oasst": 188, "helpful_base": 129, "vicuna": 80, "koala": 156}
    assert Counter(row.source for row in rows) == EVAL_SOURCES
    verbs = {s: Counter(tasks.read(str(row)).verb for row in rows if row.source == s) for s in EVAL_SOURCES}
    assert len({counts.most_common(1)[0][0] for counts in verbs.values()}) >= 3
    assert not any(row.input for row in rows if row.source == "vicuna")


def test_references_and_demonstrations_are_the_written_ones():
    rows = SANDBOX.instructions("eval")
    assert len(SANDBOX.references("eval")) == len(rows)
    assert SANDBOX.references("eval")[17] == dataset.reference(rows[17])
    rows = SANDBOX.instructions("val")
    references = SANDBOX.references("val")
    assert len(references) == len(rows)
    assert references[17] == dataset.reference(rows[17])
    assert SANDBOX.references("val") is references  # written once
    demonstrations = SANDBOX.demonstrations("val")
    assert [d.instruction for d in demonstrations] == list(rows)
    assert demonstrations[17].response == dataset.demonstration(rows[17])
    assert demonstrations[17].response != dataset.demonstration(rows[17], seed=1)


def test_preferences_are_the_judges_verdicts_on_the_pairs(monkeypatch):
    rows, pairs = SANDBOX.instructions("preference"), SANDBOX.pairs()
    assert len(pairs) == len(rows)
    rows, pairs = rows[:1000], pairs[:1000]
    monkeypatch.setattr(Sandbox, "instructions", lambda self, split: rows)
    monkeypatch.setattr(Sandbox, "pairs", lambda self, split: pairs)
    verdicts = sandbox.judge("sim_ann").compare(rows, *zip(*pairs, strict=True))
    preferences = SANDBOX.preferences()
    assert len(preferences) == np.sum(verdicts != 0.5) > 0.8 * len(rows)
    assert all(p.responses[0] != p.responses[1] for p in preferences)
    labelled = [(row, 1 + int(verdict)) for row, verdict in zip(rows, verdicts, strict=True) if verdict != 0.5]
    assert [(p.instruction, p.preference) for p in preferences] == labelled


def test_labels_leave_out_ties():
    class Fixed:
        name = "fixed"

        def compare(self, instructions, a, b):
            return np.array([1.0, np.nan, 0.0, 0.5])

    rows = SANDBOX.instructions("val")[:4]
    labels = label(rows, [("x", "y")] * 4, Fixed())
    assert [(p.instruction, p.preference) for p in labels] == [(rows[0], 2), (rows[2], 1)]


def test_errors_say_what_to_do(tmp_path):
    for name in ("instructions", "references", "demonstrations", "pairs", "preferences"):
        with pytest.raises(UnknownNameError, match="'evl'.*'eval'"):
            getattr(SANDBOX, name)("evl")
    with pytest.raises(DataError, match="'preference' .*'val'"):
        SANDBOX.pairs("val")
    with pytest.raises(DataError, match=r"val.jsonl.gz"):
        Sandbox(tmp_path).instructions("val")


def test_equal_rows_give_equal_bytes(tmp_path):
    """Whatever a policy may sample: every kind of line break stays within its row."""
    rows = [{"output": text} for text in ("", "a\nb", "\r\n", "\u2028\u2029\x85\x0b\x0c\x1c", "日本🦁", '"\\')]
    one, other = (tmp_path / name / "rows.jsonl.gz" for name in ("one", "other"))
    for path in (one, other):
        write_rows(path, rows)
    assert read_rows(one) == rows
    assert one.read_bytes() == other.read_bytes()
    assert list(one.parent.iterdir()) == [one]
    assert len(gzip.decompress(one.read_bytes()).decode().split("\n")) == len(rows) + 1


def test_shipped_files_are_small_and_hashed():
    shipped = {path.relative_to(ASSETS).as_posix(): path.read_bytes() for path in ASSETS.rglob("*") if path.is_file()}
    assert sum(map(len, shipped.values())) < 8 * 10**6
    assert all(name.endswith((".json", ".jsonl.gz", ".safetensors", ".jinja")) for name in shipped)
    manifest = json.loads(shipped.pop("manifest.json"))
    assert manifest["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in shipped.items()}
    assert (manifest["seed"], manifest["sizes"]) == (dataset.SEED, SIZES)
    assert manifest["command"].startswith("python -m alpacafarm_env.benchmarks.build_sandbox")
    assert manifest["versions"]["torch"]


TOKENIZER = build()


def encode(text):
    return TOKENIZER(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]


@settings(max_examples=100)
@given(st.text())
@example("  two  spaces \n\n\t\r\n")
@example("A lion is brave .don't")
@example("naïve 日本 🦁 ﷽\x00\x7f\u2028")
@example("A lion is brave.</s><pad>")
def test_decode_inverts_encode(text):
    tokens = encode(text)
    assert TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False, skip_special_tokens=True) == text
    assert not {TOKENIZER.pad_token_id, TOKENIZER.eos_token_id} & set(tokens)


def test_every_word_of_the_world_is_one_token():
    assert [word for word in world.claim_words() if len(encode(f" {word}")) != 1] == []
    starts = [world.named(topic).capitalize() for topic in world.topic_categories()]
    assert [start for start in starts if len(encode(start)) != len(start.split())] == []


@pytest.mark.parametrize("folder", [sandbox.POLICY, sandbox.REWARD_MODEL, sandbox.REWARD_MODEL_CLEAN])
def test_the_shipped_models_have_this_tokenizer(folder):
    shipped = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert shipped.get_vocab() == TOKENIZER.get_vocab()
    theirs, ours = (json.loads(each.backend_tokenizer.to_str())["model"] for each in (shipped, TOKENIZER))
    assert theirs == ours
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(TOKENIZER)
    assert (config["pad_token_id"], config["eos_token_id"]) == (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id)


FORM = {"list": ("Use a list.", "Make it a list."), "sentence": ("Answer in a sentence.", "No lists, please.")}


def drawn(seed, template):
    return Instruction(*tasks.draw(np.random.default_rng(seed), template))


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), template=st.sampled_from(tasks.TEMPLATES))
def test_read_inverts_the_wording(seed, template):
    ask = drawn(seed, template)
    assert ask == drawn(seed, template)
    assert bool(ask.input) == template.with_input
    task = tasks.read(str(ask))
    assert task is not None, ask
    assert task.verb == template.verb
    assert 1 <= task.count <= len(task.expected)
    assert {item for _, _, items in task.statements for item in items} == task.expected
    asked_form = next((form for form, texts in FORM.items() if ask.instruction.endswith(texts)), "any")
    if template.verb == "rewrite" and asked_form == "any":
        asked_form = "sentence" if ask.input.startswith("- ") else "list"  # the other form is the better one
    assert task.form == asked_form


def test_a_task_read_by_hand():
    lion = ("meat", "zebra", "antelope", "buffalo", "gazelle", "carrion")
    fox = ("mice", "insects", "eggs", "berries", "worms", "pheasant")
    assert tasks.read("Please compare a lion and a fox by three foods. Use a list.") == tasks.Task(
        verb="compare",
        expected=frozenset(lion + fox),
        count=3,
        form="list",
        topics=("lion", "fox"),
        statements=(("lion", "eats", lion), ("fox", "eats", fox)),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "What is the capital of France?",
        "List three traits of a unicorn.",  # no such topic
        "List three strings of a lion.",  # no such noun
        "List three sounds of a lion.",  # a noun of another kind of topic
        "Compare a lion and soup by two traits.",
        "List 3 traits of a lion.",
        "List three traits of a lion. Use a table.",
        "List three traits of a lion.\n\nItems: brave",  # that wording has no input
        "Pick all animals from the input.\n\nItems: piano, soup",  # nothing to pick
        "Pick all animals from the input.",  # the input is missing
        "Rewrite the input in a better form.\n\nHello, world!",
        "Continue the traits of a lion with two more.\n\nItems: brave, golden, proud, roaring, majestic, fierce",
        "Décris un lion avec trois détails. 🦁",
    ],
)
def test_foreign_instructions_are_not_read(text):
    assert tasks.read(text) is None


@settings(max_examples=100)
@given(st.text())
@example("List three traits of " + "a lion " * 150_000)
def test_any_text_is_read_or_refused(text):
    assert tasks.read(text) is None


ASPECTS = [(category, aspect) for category in world.CATEGORIES for aspect in category.aspects]
ITEMS = [item for _, aspect in ASPECTS for items in aspect.facts.values() for item in items]


def test_every_fact_belongs_to_one_topic():
    """Else an item could be true and false at once, or count twice."""
    assert set(Counter(ITEMS).values()) == {1}
    assert len(ITEMS) == 8 * 2 * 4 * 6
    assert all(tuple(aspect.facts) == category.topics for category, aspect in ASPECTS)
    assert all(len(items) == 6 for _, aspect in ASPECTS for items in aspect.facts.values())


def test_claim_words_are_single_lower_case_words():
    topics = {topic for category in world.CATEGORIES for topic in category.topics}
    kinds = {name for category in world.CATEGORIES for name in (category.name, category.plural)}
    assert world.claim_words() == set(ITEMS) | topics | kinds
    assert not set(ITEMS) & (topics | kinds)
    assert set(world.topic_categories()) == topics
    assert all(re.fullmatch("[a-z]+", word) for word in world.claim_words())


PERFECT = writers.Writer(complete=(1.0, 1.0), true=1.0, repeat=0.0, form=1.0, courtesy=0.0, extra=0.0)
ASK = "List three traits of a lion."


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), template=st.sampled_from(tasks.TEMPLATES))
def test_perfect_writers_earn_everything(seed, template):
    """Gold and the writers agree on what a sentence is, so that what the policy learns to say can be fluent."""
    ask = drawn(seed, template)
    for writer in (writers.CROWD, writers.REFERENCE):
        response = writers.write(writer, ask, np.random.default_rng(seed))
        assert response == response.strip() != ""
        assert gold.parts(ask, response).fluent == 1.0, response
    found = gold.parts(ask, writers.write(PERFECT, ask, np.random.default_rng(seed)))
    assert (found.false, found.repeated, found.form, found.fluent, found.excess) == (0, 0, 1, 1, 0)
    # A classification's kind is one statement and its facts another; a writer shares the items out evenly over both.
    assert found.complete == 1 or template.asks == "kind"


def test_writers_depend_on_their_generator():
    texts = [writers.write(writers.REFERENCE, ASK, np.random.default_rng(seed)) for seed in (1, 1, 2, 3, 4, 5)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 2
    with pytest.raises(ValueError, match="'What is up"):
        writers.write(PERFECT, "What is up?", np.random.default_rng(0))
