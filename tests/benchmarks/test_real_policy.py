"""The study of a real policy, with a tiny one and a made-up folder of recorded judgements."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from alpacafarm_env import sandbox
from alpacafarm_env.benchmarks.harness.page import read_table
from alpacafarm_env.benchmarks.real_policy import curves, sampling
from alpacafarm_env.benchmarks.real_policy.__main__ import RealPolicyOptions, cells_of, run
from alpacafarm_env.benchmarks.real_policy.page import TABLES, page
from alpacafarm_env.benchmarks.real_policy.plan import Sizes, world_of
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.errors import CheckpointError, DataError
from alpacafarm_env.seeding import keyed_rng

TINY = Sizes(
    tiers=((8, 6), (16, 4)),
    block=4,
    tokens=12,
    blocks_a_cell=5,
    recorded_tokens=16,
    components=4,
    labels=(10, 20),
    flips=(0.0, 0.25, 0.45),
    repeats=2,
    trained=10,
    steps=(0, 1),
    rollouts=4,
)
NUM, MODELS = 40, 6
# A sample that was cut at the limit is learned as it was sampled: without an end.
pytestmark = pytest.mark.filterwarnings("ignore:.*responses are cut to max_response_tokens:UserWarning")


ASKED = sandbox.SANDBOX.instructions("eval")[:NUM]
WORDS = sorted({word for text in sandbox.SANDBOX.references("eval")[:NUM] for word in text.split()})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder of noise whose judge prefers the text with more words, and is sometimes wrong."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "outputs").mkdir()

    def text(*key):
        rng = keyed_rng(0, *key)
        return " ".join(rng.choice(WORDS, size=int(rng.integers(1, 14))))

    def verdict(text, reference, *key):
        return float(len(text.split()) - len(reference.split()) + keyed_rng(1, *key).normal(0, 2) > 0)

    def rows(generator, texts):
        return [
            {"index": n, "instruction": each.instruction, "input": each.input, "output": text, "generator": generator}
            for n, (each, text) in enumerate(zip(ASKED, texts, strict=True))
        ]

    references = [text("reference", number) for number in range(NUM)]
    outputs = {f"model-{m}": [text("model", m, number) for number in range(NUM)] for m in range(MODELS)}
    verdicts = [
        {"index": n, "generator": name, "preference": verdict(texts[n], references[n], name, n)}
        for name, texts in outputs.items()
        for n in range(NUM)
    ]
    files = {
        "eval_instructions": [
            {"index": n, "instruction": each.instruction, "input": each.input, "dataset": "made up"}
            for n, each in enumerate(ASKED)
        ],
        "davinci003": rows("davinci003", references),
        "preferences_words": verdicts,
        "recorded": {"reference_sha256": reference_digest(ASKED, references)},
        **{f"outputs/outputs_{name}": rows(name, texts) for name, texts in outputs.items()},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture
def options(recorded, tmp_path):
    given = {"policy": str(sandbox.POLICY), "data": str(recorded), "sizes": TINY, "seeds": 1, "processes": 1}
    return RealPolicyOptions(out=tmp_path / "study", **given)


@pytest.fixture(scope="module")
def finished(recorded, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    given = {"policy": str(sandbox.POLICY), "data": str(recorded), "sizes": TINY, "seeds": 1, "processes": 1}
    return RealPolicyOptions(out=out, **given), run(RealPolicyOptions(out=out, **given))


def test_every_part_is_done_and_shown(finished):
    options, status = finished
    assert status == 0
    tables = {name: read_table(options.out / f"{'table' if name == 'curves' else name}.csv") for name in TABLES}
    assert all(len(table) for table in tables.values())
    made = page(options.out)
    assert set(made.figures) == {"best_of_n_own", "best_of_n_recorded", "training"}
    assert not any("Not finished" in text for text in made.findings)
    assert {*tables["runs"].method} == {"ppo", "grpo", "rloo", "dpo"}
    assert {*tables["curves"].kind} == {"linear", "trees", "lora"}
    start = tables["curves"][tables["curves"].n == 1]
    assert (start["mean"] == 0).all()
    assert np.isfinite(tables["falls"].drop_mean).all()


def test_no_instruction_reaches_a_stored_table(finished):
    options, _ = finished
    for name in ("table", "falls", "texts", "runs"):
        table = (options.out / f"{name}.csv").read_text(encoding="utf-8")
        assert not [each for each in ASKED if str(each) in table]


def test_parts_before_their_needs_are_refused(options):
    with pytest.raises(DataError):
        run(replace(options, parts=("curves",)))
    assert run(replace(options, parts=("page",))) == 0
    assert any("answers" in text for text in page(options.out).findings)


def test_texts_do_not_depend_on_the_chunks(options, tmp_path):
    texts = []
    for name, size in (("one", 1), ("all", 99)):
        plan = replace(options.plan, out=tmp_path / name, sizes=replace(TINY, blocks_a_cell=size))
        plan.out.mkdir()
        for blocks in reversed([*plan.chunks()]):
            sampling.draw_answers(plan, "cell", blocks, lambda update: None)
        texts.append([plan.texts(place) for place in range(6)])
    assert texts[0] == texts[1]
    assert [len(each) for each in texts[0]] == [16, 16, 16, 16, 8, 8]
    assert len({text for row in texts[0] for text in row}) > 40


def test_an_interrupted_cell_keeps_its_blocks(options):
    plan = replace(options.plan, out=options.out)
    plan.out.mkdir()
    blocks = next(plan.chunks())
    sampling.draw_answers(plan, "cell", blocks[:3], lambda update: None)
    before = {file: file.stat().st_mtime_ns for file in (plan.out / "answers").iterdir()}
    sampling.draw_answers(plan, "cell", blocks, lambda update: None)
    assert len(before) == 3
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())


def test_cells_of_fewer_samples_are_among_those_of_more(options):
    whole = options.plan
    small = [*replace(whole, upto=8).chunks()]
    assert [*whole.chunks()][: len(small)] == small


def test_gold_never_sees_an_answered_instruction(options):
    world = world_of(options.plan)
    assert not set(world.answered) & set(world.others)
    assert len(world.answered) + len(world.others) == NUM


def test_proxies_are_judged_on_other_instructions(finished):
    options, _ = finished
    plan = options.plan
    for half in (0, 1):
        made = curves.make_half(plan, "a", "own", half)
        assert {place % 2 for place in made.places} == {half}
        assert len(made.learned) == len(made.places)


def test_a_real_fall_is_found_and_sized():
    rng, ns = np.random.default_rng(0), curves.ns_of(64)
    shape = np.interp(np.arange(len(ns)), [0, 6, len(ns) - 1], [0.0, 0.5, 0.2])
    golds = shape + rng.normal(0, 0.02, (2, 5, 20, 1)) + rng.normal(0, 0.01, (2, 5, 20, len(ns)))
    rows = pd.DataFrame(curves.tier_rows({"samples": 64}, [0.0, 0.25], golds, golds, np.ones((2, 5))))
    falls = rows[rows.table == "falls"]
    assert falls.drop_mean.to_numpy() == pytest.approx(0.3, abs=0.02)
    assert (falls.drop_low > 0).all()


def test_pairs_are_of_two_texts_that_gold_decides():
    golds = np.array([[0.0, 1.0, np.nan, 1.0], [2.0, 2.0, 2.0, 5.0]])
    pairs = curves.draw_pairs(golds, 30, "some")
    one, two = golds[pairs.rows, pairs.first], golds[pairs.rows, pairs.second]
    assert (pairs.labels == (one > two)).all()
    assert (one != two).all()


def test_a_folder_of_another_policy_is_refused(finished, own_models):
    options, _ = finished
    with pytest.raises(CheckpointError):
        run(replace(options, policy=str(own_models[1])))
    with pytest.raises(DataError):
        run(replace(options, policy=""))


def test_tiers_of_ones_own_are_checked(options):
    assert replace(options, sizes=None, tiers=((64, 80), (256, 24))).plan.tiers == [(64, 80), (256, 24)]
    for wrong in ((), ((64, 3),), ((65, 80),), ((64, 80), (256, 90)), ((256, 24), (64, 80))):
        with pytest.raises(DataError):
            _ = replace(options, sizes=None, tiers=wrong).plan


def test_cells_can_be_sent_to_other_processes(options):
    cells = [cell for each in cells_of(options.plan, 1).values() for cell in each]
    # What is defined in a __main__ cannot be found there by another process.
    assert not [cell.key for cell in cells if cell.work.func.__module__.endswith("__main__")]
