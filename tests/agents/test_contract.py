"""Every agent keeps the promises of `agent_contract`, and so does README's agent of one's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import agent_contract as contract
import pytest
from agent_worlds import ACTORS, EXACT, RUNS
from test_processes import TORCHRUN, begin
from tiny_models import TEMPLATE, build_llama, build_tokenizer

from alpacafarm_env.agents.language_model import LanguageModel

TRAINED = [name for name in ACTORS if name != "best_of_n"]
GREEDY = [name for name in TRAINED if name not in ("expert_iteration", "reinforce")]
"""Those whose config says how `act` samples."""

ATOL = dict.fromkeys(EXACT, 1e-6) | {"expert_iteration": 2e-4}  # its many steps make more of rounding


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two saved policies that differ."""
    folders = [tmp_path_factory.mktemp("policy") for _ in range(2)]
    for seed, folder in enumerate(folders):
        tokenizer = build_tokenizer()
        LanguageModel(build_llama(len(tokenizer), seed=seed), tokenizer, TEMPLATE).save(folder)
    return folders


@pytest.mark.parametrize("name", ACTORS)
def test_answers(name: str, policies: list[Path]) -> None:
    contract.check_answers(ACTORS[name], policies[0])


@pytest.mark.parametrize("name", [*GREEDY, "best_of_n"])
def test_order(name: str, policies: list[Path]) -> None:
    greedy = {"act_temperature": 0.0} if name in GREEDY else {}
    contract.check_order(partial(ACTORS[name], **greedy), policies[0])


@pytest.mark.parametrize("name", ACTORS)
def test_saving(name: str, policies: list[Path], tmp_path: Path) -> None:
    contract.check_saving(ACTORS[name], *policies, tmp_path / "saved")


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, policies: list[Path]) -> None:
    contract.check_training(ACTORS[name], policies[0])


@pytest.mark.parametrize("name", RUNS)
def test_resuming(name: str, policies: list[Path], tmp_path: Path) -> None:
    contract.check_resuming(RUNS[name], policies[0], tmp_path)


def test_two_processes_train_as_one(policies: list[Path], tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    worlds = [begin("train", policies[0], one), begin("train", policies[0], two, *TORCHRUN)]
    assert [world.wait(300) for world in worlds] == [0, 0]
    for name, make in {**RUNS, **EXACT}.items():
        contract.check_same_training(one / name, two / name, atol=ATOL.get(name, 5e-6))
        assert make(policies[0], two / name, seed=2).learn() == {}  # one process goes on where two have stopped
