"""Writers: legal sentences only, habits that show in the numbers, and a perfect one that shows gold can be reached."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpacafarm_env.instructions import Instruction
from alpacafarm_env.sandbox import gold, tasks, writers

PERFECT = writers.Writer(complete=(1.0, 1.0), true=1.0, repeat=0.0, form=1.0, courtesy=0.0, extra=0.0)
ASK = "List three traits of a lion."


def drawn(seed, template):
    return Instruction(*tasks.draw(np.random.default_rng(seed), template))


def mean_parts(writer, num=12):
    """Over `num` instructions of every wording."""
    asks = [drawn(seed, template) for seed in range(num) for template in tasks.TEMPLATES]
    rows = [gold.parts(ask, writers.write(writer, ask, np.random.default_rng(k))) for k, ask in enumerate(asks)]
    return {name: np.mean([getattr(row, name) for row in rows]) for name in gold.Parts.__dataclass_fields__}


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), template=st.sampled_from(tasks.TEMPLATES))
def test_writers_are_fluent_and_a_perfect_one_earns_everything(seed, template):
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


def test_habits_show_in_the_parts():
    base, crowd, reference = (mean_parts(writer) for writer in (PERFECT, writers.CROWD, writers.REFERENCE))
    assert mean_parts(replace(PERFECT, complete=(0.5, 0.5)))["complete"] < base["complete"] - 0.2
    assert mean_parts(replace(PERFECT, true=0.5))["false"] > 1
    assert mean_parts(replace(PERFECT, repeat=0.5))["repeated"] > 0.5
    assert mean_parts(replace(PERFECT, form=0.0))["form"] < 0.9
    assert reference["complete"] > crowd["complete"]  # Davinci003's stand-in says more, and more that is false
    assert reference["false"] > crowd["false"]


def test_courtesies():
    polite, num = replace(PERFECT, courtesy=1.0), 400
    texts = [writers.write(polite, ASK, np.random.default_rng(k)) for k in range(num)]
    assert all(text.startswith(gold.OPENERS) for text in texts)
    assert sum(text.endswith(gold.CLOSERS) for text in texts) / num == pytest.approx(0.5, abs=0.1)  # 4 sigma
    assert not writers.write(PERFECT, ASK, np.random.default_rng(0)).startswith(gold.OPENERS)


def test_the_generator_decides_and_a_foreign_instruction_is_refused():
    texts = [writers.write(writers.REFERENCE, ASK, np.random.default_rng(seed)) for seed in (1, 1, 2, 3, 4, 5)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 2
    with pytest.raises(ValueError, match="'What is up"):
        writers.write(PERFECT, "What is up?", np.random.default_rng(0))
