"""People's labels beside the simulated judges, in one study."""

import json

import numpy as np
import pytest
import written
from annotator_worlds import make_assets, run, shut_off

from alpacafarm_env.benchmarks.annotators import command as annotators
from alpacafarm_env.benchmarks.annotators.rows import rows_of


@pytest.fixture
def assets(tmp_path, monkeypatch):
    shut_off(monkeypatch, tmp_path)
    rows = rows_of("human", [{"agreement": np.ones(40), "variance": np.zeros(40)}], "sandbox")
    monkeypatch.setattr(annotators, "judge_rows", lambda judge, question: rows if judge == "human" else [])
    return make_assets(tmp_path / "assets")


def labels(path, num, bob):
    """Ann always takes the first, as the judge of the pairs does; Bob the first of the first `bob`."""
    rows = [
        {"instruction": f"Ask {n}", "output_1": "a", "output_2": "b", "preference": preference, "annotator": name}
        | {"raw_preference": 1 + preference, "judge_preference": 1, "judge": "gpt4", "shown_first": "output_1"}
        for n in range(num)
        for name, preference in (("Ann", 1), ("Bob", 1 + (n >= bob)))
    ]
    path.write_text(json.dumps(rows))
    return path


def test_people_have_the_figures_of_the_simulated_judges(assets, tmp_path, capsys):
    given = labels(tmp_path / "labels.json", 40, 30)
    assert run(assets, tmp_path / "out", "--labels", str(given)) == 0
    rows = {(row["judge"], row["figure"]): row for row in written.rows_of(tmp_path / "out") if row["level"] == "people"}
    values = {key: float(row["value"]) for key, row in rows.items()}
    assert values["people", "agreement"] == 0.75
    assert values["people", "prefers_first"] == 0.875
    assert values["their pairs' judge gpt4", "agreement"] == 0.875  # ten even votes count half
    assert values["people Bob", "agreement_with_judge"] == 0.75
    assert values["people Ann", "agreement_with_judge"] == 1
    assert rows["people", "variance"]["paper"] == "0.35"
    assert all(row["within"] == "" for row in rows.values())
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if "(40)" in line] == ["Ann", "Bob"]


def test_a_faulty_file_is_told_before_any_judge_is_asked(assets, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(annotators, "judge_rows", lambda *_: pytest.fail("asked"))
    rows = [{"instruction": "a", "output_1": "x", "output_2": "y", "preference": 1, "annotator": "gpt4"}]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    for name in ("none.json", "pairs.json"):
        assert run(assets, tmp_path / "out", "--labels", str(tmp_path / name)) == 2
        assert name in capsys.readouterr().err
