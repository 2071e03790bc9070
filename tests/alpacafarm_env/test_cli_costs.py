"""What the commands say of costs, and of the pairs that are asked again."""

import re

import pytest
from command_files import make_pairs, write

from alpacafarm_env.__main__ import main
from alpacafarm_env.judge_server.faults import Faults
from alpacafarm_env.judge_server.server import JudgeServer

pytestmark = pytest.mark.usefixtures("call")


@pytest.fixture(scope="module")
def filtering():
    with JudgeServer(anyway=True, faults=Faults({"finish_length": 0.5, "content_filter": 0.2})) as running:
        yield running


@pytest.fixture
def priced(tmp_path):
    path = tmp_path / "priced.yaml"
    path.write_text("{model: sandbox-gpt4, price_usd_per_million: [10.0, 30.0]}")
    return path


@pytest.fixture
def run(anyway, priced, tmp_path, capsys):
    """Annotates pairs with a model that costs something; the status, what it prints, and its figures of the costs."""

    def annotate(pairs, *args, ledger="l.sqlite", at=anyway):
        where = ["--base-url", at.base_url, "--models", f"{priced}", "--ledger", f"{tmp_path / ledger}"]
        status = main(["annotate", str(write(tmp_path / "pairs.json", pairs)), "--out", "out.json", *where, *args])
        text, err = capsys.readouterr()
        told = re.search(r"cost of this run: \$([\d.]+) for (\d+) pairs asked; (\d+) were", text)
        price = re.search(r"([\d.]+) per 1,000 pairs asked(?:, \$([\d.]+) per 1,000 pairs)?", text)
        return status, text, err, list(map(float, told.groups())), price and price.groups()

    return annotate


def test_a_resumed_noisy_run_costs_as_much_per_1000_as_a_whole_one(run):
    pairs = [row for row in make_pairs(220) if row["output_1"] != row["output_2"]]
    noisy = ("--pool", "weighted", "--flip", "0.25")
    *_, whole, price = run(pairs, *noisy)
    assert float(price[1]) == pytest.approx(1000 * whole[0] / len(pairs), rel=1e-3)
    assert float(price[0]) == pytest.approx(1000 * whole[0] / whole[1], rel=1e-3)
    run(pairs[:180], *noisy, ledger="part.sqlite")
    *_, rest, again = run(pairs, *noisy, ledger="part.sqlite")
    assert 0 < rest[1] < 30 < rest[2]  # a price by all that is not cached, noise of before included, were far off
    assert float(again[1]) == pytest.approx(float(price[1]), rel=0.1)


def test_a_run_that_pays_nothing_has_no_price(run):
    pairs = make_pairs(10)
    *_, price = run(pairs, "--pool", "greedy")
    assert price[1] is not None
    *_, costs, price = run(pairs, "--pool", "greedy")
    assert (costs, price) == ([0, 0, 9], None)


def test_a_price_of_both_orders_is_a_bound_where_one_may_have_been_answered_before(run):
    pairs = make_pairs(20)
    run(pairs, "--pool", "greedy")
    _, text, _, costs, _ = run(pairs, "--pool", "greedy", "--both-orders")
    assert costs[1] == 18
    assert "price: at least $" in text


def test_the_cost_of_a_run_includes_what_brought_no_answer(run, filtering):
    """In a ledger of its own, the run has cost what the ledger counts."""
    status, text, _, costs, _ = run(make_pairs(40), at=filtering)
    assert status == 1
    assert "ContentRefusedError" in text
    assert float(re.search(r"ledger: \$([\d.]+) in all", text)[1]) == pytest.approx(costs[0], abs=2e-4)


def test_the_note_counts_exactly_what_the_same_command_asks_again(run, filtering):
    """Refused texts are asked again, replies that could not be read are not; each note is kept by the next run."""
    promised, kinds = None, set()
    for _ in range(4):
        status, text, err, costs, _ = run(make_pairs(40), at=filtering)
        assert promised in (None, costs[1])
        kinds |= set(re.findall(r"^  \d+ (\w+Error)", text, re.MULTILINE))
        again = re.search(r"asks, and pays for, (?:them|(\d+) of them) again \((.*)\), and nothing else\.", err)
        missing = int(re.search(r"(\d+) of 40 pairs have no verdict", err)[1])
        promised = int(again[1] or missing) if again else 0
        assert "Unparsable" not in (again[2] if again else "")
        assert again or "asks nothing again: replies that could not be read are final" in err
        assert status == 1
    assert kinds == {"ContentRefusedError", "UnparsableVerdictError"}
