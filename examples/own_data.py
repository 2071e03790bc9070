"""From JSON files of one's own to a policy: SFT, DPO, and a win rate.

    python examples/own_data.py                                # writes some files first, as an example
    python examples/own_data.py --data my_data --policy my_model --sft-learning-rate 4e-4 --dpo-learning-rate 2e-4

A folder of data has one file a split: here `sft.json` (demonstrations), `preference.json` (pairs with a choice) and
`eval.json` (references to beat). Without --data they are written from the sandbox's texts, so that their fields can be
seen, and the model starts from random weights. The second command stops at its first evaluation until there is a judge
of your own in `make_judge`: the sandbox's refuses texts that are not the sandbox's.

With --policy the settings are AlpacaFarm's for LLaMA 7B (learning rates of 2e-5 for SFT and 1e-5 for DPO); a model as
small as the sandbox's needs higher ones, as above. Read its answers, in OUT/dpo.json: a win rate does not show that
text falls apart; lower rates help. Responses of more than --max-response-tokens are cut, and counted in a warning.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro

from alpacafarm_env import Dataset, PreferenceOracle, load_dataset, make_oracle, sandbox
from alpacafarm_env.agents import DPO, SFT, DPOConfig, LanguageModel, PolicyActor, SFTConfig
from alpacafarm_env.statistics import win_rate


@dataclass
class Options:
    """SFT and DPO on data of one's own."""

    data: Path | None = None
    """Folder with sft.json, preference.json and eval.json. None: written from the sandbox."""
    policy: Path | None = None
    """Folder of a causal language model. None: the sandbox's, with random weights."""
    num_demonstrations: int = 10_000
    """Of them that are written, if data is."""
    num_preferences: int = 2000
    num_eval: int = 805
    epochs: int = 2
    """Of SFT."""
    sft_learning_rate: float | None = None
    """None: the config's; of DPO too."""
    dpo_learning_rate: float | None = None
    max_response_tokens: int | None = None
    """Longest response. None: the policy's own, 64 for the sandbox's and 300 for a larger one."""
    seed: int = 0
    out: Path = Path("results/own_data")


def write_example(folder: Path, options: Options) -> None:
    """Three files, with the fields that files of your own need."""
    world = sandbox.SANDBOX
    demonstrations = world.demonstrations("sft")[: options.num_demonstrations]
    pairs = world.preferences()[: options.num_preferences]
    references = zip(world.instructions("eval"), world.references("eval"), strict=True)
    splits = {
        "sft": [{**fields(each.instruction), "output": each.response} for each in demonstrations],
        "preference": [
            {
                **fields(each.instruction),
                "output_1": each.responses[0],
                "output_2": each.responses[1],
                "preference": each.preference,  # 1 or 2
            }
            for each in pairs
        ],
        "eval": [{**fields(asked), "output": reference} for asked, reference in references][: options.num_eval],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def fields(instruction) -> dict[str, str]:
    """An instruction's two."""
    return {"instruction": instruction.instruction, "input": instruction.input}


def load_policy(options: Options) -> LanguageModel:
    """That of --policy, or the sandbox's architecture and tokenizer, untrained."""
    folder = sandbox.POLICY if options.policy is None else options.policy
    policy = LanguageModel.from_pretrained(folder, max_response_tokens=options.max_response_tokens)
    if options.policy is None:
        torch.manual_seed(options.seed)
        policy.model.load_state_dict(type(policy.model)(policy.model.config).state_dict())
    return policy


def make_judge(seed: int) -> PreferenceOracle:
    """Who compares an answer with the reference: the sandbox's annotators, who know the sandbox's texts alone.

    Yours is an object with `name` and `compare`, or a mapping such as {"pool": "eval", "base_url": ...} of LLM judges.
    """
    return sandbox.judge("eval", seed)


def evaluate(when: str, agent: SFT | DPO, data: Dataset, options: Options) -> None:
    """Prints the win rate against the references, and writes the answers for `alpacafarm judge evaluate`."""
    asked = data.instructions("eval")
    answers = agent.act(asked)
    found = win_rate(make_oracle({"judge": make_judge(options.seed)}, dataset=data).score(asked, answers))
    print(f"{when:6} {found.win_rate:5.1f} % ({found.standard_error:.1f})  {sum(map(len, answers)) / len(asked):4.0f}")
    rows = [{**fields(each), "output": answer} for each, answer in zip(asked, answers, strict=True)]
    (options.out / f"{when}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def main(options: Options) -> None:
    """Trains and evaluates."""
    folder = options.data or options.out / "data"
    if options.data is None:
        write_example(folder, options)
    data = load_dataset(folder)  # a faulty row is an error that names file, record and field
    policy = load_policy(options)
    options.out.mkdir(parents=True, exist_ok=True)

    print(f"win rate against the references of eval (n = {len(data.instructions('eval'))}, standard error), characters")
    config = SFTConfig.sandbox() if options.policy is None else SFTConfig()
    config = replace(config, epochs=options.epochs, learning_rate=options.sft_learning_rate or config.learning_rate)
    sft = SFT(policy, data.demonstrations("sft"), config=config, seed=options.seed)
    evaluate("before", sft, data, options)
    sft.learn()
    evaluate("sft", sft, data, options)
    config = DPOConfig.sandbox() if options.policy is None else DPOConfig()
    config = replace(config, learning_rate=options.dpo_learning_rate or config.learning_rate)
    dpo = DPO(sft.policy, data.preferences(), config=config, seed=options.seed)  # its reference is the policy as it is
    dpo.learn()
    evaluate("dpo", dpo, data, options)
    dpo.save(options.out / "policy")
    print(f"policy and answers: {options.out}")
    question = data.instructions("eval")[0]
    (answer,) = PolicyActor(options.out / "policy").act([question])  # as another script would load it
    print(f"> {question}\n{answer}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # models this small lose by more on a busy machine
    main(tyro.cli(Options))
