"""The study of reward models fitted to ratings: its table, and that all of them learn."""

import pandas as pd
import pytest

from alpacafarm_env.benchmarks.ratings.command import DATA, fitted_to, main
from alpacafarm_env.instructions import Preference


def test_what_is_learned_from(monkeypatch):
    """Of the same responses: two ratings a pair, and the pairs that they settle."""
    records = {}
    for name in ("RatingModeling", "RewardModeling"):
        monkeypatch.setattr(f"alpacafarm_env.agents.{name}", lambda _, data, **__: data, raising=False)
    for data in DATA:
        records[data], count = fitted_to(data, "human", 50, 0)
        assert count == len(records[data])
    given = {(str(each.instruction), each.response): each.rating for each in records["ratings"]}
    assert len(records["ratings"]) == 100
    assert 20 < len(records["binarized"]) < 50
    for pair in records["binarized"]:
        assert isinstance(pair, Preference)
        assert given[str(pair.instruction), pair.chosen] > given[str(pair.instruction), pair.rejected]


def test_a_small_study(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("alpacafarm_env.benchmarks.ratings.command.NUM_FRESH", 200)
    assert main(["--quick", "--num", "32", "--seeds", "1", "--raters", "sim_gpt4", "--out", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "table.csv")
    assert list(table.data) == list(DATA)
    assert table.num_trained.to_list()[0] == 64
    assert (table.n == 40).all()
    assert {"report.html", "manifest.json"} <= {path.name for path in tmp_path.iterdir()}
    assert "binarized   21 " in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--num=5", "--data=folder"])
def test_options_without_sense_are_refused(tmp_path, capsys, option):
    with pytest.raises(SystemExit):
        main(["--quick", "--out", str(tmp_path), option])
    assert f"{option.split('=')[0]}: expected" in capsys.readouterr().err
