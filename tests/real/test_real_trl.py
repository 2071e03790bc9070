"""What a command saves trains on in TRL, after a move and from elsewhere. Skipped where TRL is not installed."""

import pytest

from alpacafarm_env.agents import DPO, DPOConfig, LanguageModel
from alpacafarm_env.instructions import Instruction, Preference

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default")]  # of other libraries'
NUM = 4


def test_dpo_goes_on_in_trl_as_with_us(moved, rows, tmp_path):
    folder = moved("dpo")
    pairs = [Preference(Instruction(row["instruction"]), (row["output"], row["worse"]), 1) for row in rows[:NUM]]
    config = DPOConfig(batch_size=NUM, max_grad_norm=1e9)
    policy = LanguageModel.from_pretrained(folder)
    ours = next(DPO(policy, pairs, config=config).updates())
    # Text by the chat template up to the answer: in messages TRL would have it end with the template's line break too.
    prompts = [policy.tokenizer.decode(ids) for ids in policy.encode_prompts([str(pair.instruction) for pair in pairs])]
    columns = {"prompt": prompts, "chosen": [row["output"] for row in rows[:NUM]]}
    data = datasets.Dataset.from_dict({**columns, "rejected": [row["worse"] for row in rows[:NUM]]})
    step = {
        "max_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": NUM,
        "max_grad_norm": 1e9,
        "beta": config.beta,
    }
    numbers = {"bf16": False, "use_cpu": True, "max_length": None, "learning_rate": 1e-4}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "output_dir": str(tmp_path / "trl")}
    trainer = trl.DPOTrainer(str(folder), args=trl.DPOConfig(**step, **numbers, **quiet), train_dataset=data)
    trainer.train()
    first, second = trainer.state.log_history[:2]
    assert first["loss"] == pytest.approx(ours["loss"], abs=1e-5)
    assert first["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
    assert second["loss"] < first["loss"]
