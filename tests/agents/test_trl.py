"""TRL's trainers on what we export: their first step is ours. Skipped where TRL is not installed."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from tiny_worlds import build_llama, build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from alpacafarm_env import sandbox
from alpacafarm_env.agents import DPO, DPOConfig, LanguageModel, RewardModeling, RewardModelingConfig
from alpacafarm_env.cli.export import export_split
from alpacafarm_env.data import load_dataset
from alpacafarm_env.data.files import write_records
from alpacafarm_env.integrations import prompts, reward_function
from alpacafarm_env.monitors import Detector, Monitor, OveroptimizationWarning
from alpacafarm_env.templates import PromptTemplate

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # of other libraries'

# A message has no field for the input, so that it follows after a blank line, as in the sandbox's own template.
TEMPLATE = PromptTemplate(with_input="Q: {instruction}\n\n{input}\nA:", without_input="Q: {instruction}\nA:")
NUM = 6
ROWS = [
    {
        "instruction": f"Say {'something ' * n}about {n}.",
        "input": "é\u2028 x" * (n % 2),
        "output_1": f"- {n}\n" * n,
        "output_2": f" It is {n}, \U0001f411. ",
        "preference": 1 + n % 2,
    }
    for n in range(1, NUM + 1)
]


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Any, Any]:
    """The preferences as `datasets` reads our export, and as we do."""
    (tmp_path / "data").mkdir()
    write_records(tmp_path / "data" / "preference.jsonl", ROWS)
    out = tmp_path / "export"
    export_split("trl", dataset=str(tmp_path / "data"), split="preference", to="hub-folder", out=out)
    theirs = datasets.load_dataset(str(out), split="preference", cache_dir=str(tmp_path / "cache"))
    return theirs, load_dataset(out).preferences()


def policy(seed: int, folder: Path) -> Path:
    tokenizer = build_tokenizer()
    LanguageModel(build_llama(len(tokenizer), seed=seed), tokenizer, TEMPLATE, max_response_tokens=64).save(folder)
    return folder


def first_step(trainer: type, config: type, folder: Path, data: Any, **given: Any) -> dict[str, float]:
    step = {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": NUM, "max_grad_norm": 1e9}
    numbers = {"bf16": False, "use_cpu": True, "max_length": None}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "output_dir": str(folder / "trl")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = trainer(str(folder), args=config(**step, **numbers, **quiet), train_dataset=data, **given)
        made.train()
    logged: dict[str, float] = made.state.log_history[0]
    print(f"trl {trl.__version__}, datasets {datasets.__version__}: {logged}")
    return logged


def test_a_reward_models_first_step_is_ours(tmp_path: Path, pairs: tuple[Any, Any]) -> None:
    config = RewardModelingConfig(batch_size=NUM, max_grad_norm=1e9)
    start = RewardModeling(policy(0, tmp_path / "policy"), pairs[1], config=config, seed=3)
    start.save(tmp_path / "start")
    ours = next(start.updates())
    theirs = first_step(trl.RewardTrainer, trl.RewardConfig, tmp_path / "start", pairs[0])
    assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert abs(ours["loss"] - 0.6931) > 0.01  # that of equal scores


def test_dpos_first_step_is_ours(tmp_path: Path, pairs: tuple[Any, Any]) -> None:
    """From a policy that is not its reference: the loss of one that is would be log 2 on any data."""
    reference, other = policy(0, tmp_path / "reference"), policy(1, tmp_path / "other")
    agent = DPO(LanguageModel.from_pretrained(reference), pairs[1], config=DPOConfig(batch_size=NUM, max_grad_norm=1e9))
    agent.load(other)
    ours = next(agent.updates())
    model = build_llama(len(build_tokenizer()), seed=0)
    theirs = first_step(trl.DPOTrainer, trl.DPOConfig, other, pairs[0], ref_model=model)
    assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
    assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert abs(ours["loss"] - 0.6931) > 0.01


def test_a_monitor_warns_and_stops_trls_grpo(tmp_path: Path) -> None:
    always = Detector({"distance": 0.0}, {"distance": 1.0}, {"distance": 1.0}, intercept=0.0, threshold=-1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(sandbox.POLICY)
        tokenizer = AutoTokenizer.from_pretrained(sandbox.POLICY)
    # The user's own lines:
    args = trl.GRPOConfig(str(tmp_path), max_steps=4, num_generations=4, per_device_train_batch_size=4, beta=0.04,
                          max_completion_length=16, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
                          save_strategy="no", disable_tqdm=True)  # fmt: skip
    monitor = Monitor(always, action="stop")
    trainer = trl.GRPOTrainer(model, reward_function("surrogate"), args, prompts("unlabeled"),
                              processing_class=tokenizer, callbacks=[monitor.for_trl()])  # fmt: skip
    with pytest.warns(OveroptimizationWarning):
        trainer.train()
    assert monitor.warned == trainer.state.global_step == 1
    assert {"score/mean", "score/std", "tokens/mean", "finished", "kl/k1", "entropy"} <= monitor._metrics[0].keys()
