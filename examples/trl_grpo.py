"""TRL's GRPO trains the sandbox's policy by an oracle of this package.

    pip install trl datasets       # no dependencies of this package; run with TRL 1.16
    python examples/trl_grpo.py

`prompts` gives a split as TRL's data set, and `reward_function` an oracle as one of its `reward_funcs`; both take data
and oracles of your own. Before and after, the policy answers instructions of val; the surrogate's score (trained on)
and gold (what was meant) are printed.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from alpacafarm_env import load_dataset, make_oracle, sandbox
from alpacafarm_env.agents import LanguageModel
from alpacafarm_env.integrations import prompts, reward_function


@dataclass
class Options:
    """TRL's GRPO on the sandbox."""

    steps: int = 40
    batch_size: int = 32
    """Responses a step, 8 to each instruction."""
    learning_rate: float = 3e-4
    oracle: str = "surrogate"
    num_eval: int = 256
    """Instructions of val."""
    seed: int = 0


def evaluate(when: str, folder: Path, options: Options) -> None:
    """Prints a row: surrogate and gold of one response to each instruction."""
    data = load_dataset("sandbox")
    asked, generator = data.instructions("val")[: options.num_eval], torch.Generator().manual_seed(0)
    answers = LanguageModel.from_pretrained(folder).generate(asked, generator=generator, temperature=0.7).texts
    row = f"{when:6}"
    for name in ("surrogate", "gold"):
        scores = make_oracle(name, dataset=data).score(asked, answers)
        row += f"  {scores.mean():6.2f} ({scores.std(ddof=1) / len(asked) ** 0.5:.2f})"
    print(row)


def main(options: Options) -> None:
    """Trains, and evaluates before and after."""
    print(f"val, n = {options.num_eval}, standard errors over instructions in parentheses")
    print("        proxy          gold")
    evaluate("before", sandbox.POLICY, options)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            num_generations=8,
            max_completion_length=64,
            learning_rate=options.learning_rate,
            seed=options.seed,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(sandbox.POLICY),
            reward_funcs=reward_function(options.oracle),
            train_dataset=prompts("unlabeled"),
            processing_class=AutoTokenizer.from_pretrained(sandbox.POLICY),
            args=config,
        )
        trainer.train()
        trainer.save_model(folder)
        evaluate("after", Path(folder), options)


if __name__ == "__main__":
    main(tyro.cli(Options))
