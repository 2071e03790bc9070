"""The plan for LLaMA 7B: settings are the presets', hours the published ones, commands those of the train command."""

import csv
import shlex

import pytest

from alpacafarm_env.agents.ppo import PPOConfig
from alpacafarm_env.agents.sft import SFTConfig
from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.method_ranking.plan import (
    Places,
    Step,
    command,
    plan,
    plan_rows,
    run,
    settings_text,
    totals,
    write_plan,
)
from alpacafarm_env.benchmarks.methods.catalogue import METHODS, find_method

STEPS = {step.method: step for step in plan()}


def test_every_method_of_the_paper_that_learns_is_planned():
    learning = {method.name for method in METHODS if method.needs != "nothing" and method.paper[0] is not None}
    assert {name for name in STEPS if not name.startswith("(")} == learning


def test_steps_know_what_their_methods_need():
    for name, step in STEPS.items():
        if not name.startswith("("):
            assert step.reward == (find_method(name).needs == "reward")


def test_hours_are_the_published_ones():
    hours = {name: step.gpu_hours for name, step in STEPS.items()}
    # Under 1 h x 8; under 3 h x 4; under 2 h x 8; 4 h x 8 + under 1 h x 8; 32 GPU h for 320,000 samples.
    assert hours["(SFT 10k)"] == hours["binary_feedme"] == hours["reward_conditioning"] == 8
    assert hours["dpo"] == 12
    assert hours["ppo"] == 16
    assert hours["expert_iteration"] == 40
    assert hours["best_of_n"] == pytest.approx(32 * 805 * 1024 / 320_000)
    assert hours["quark"] is None
    assert STEPS["quark"].basis == "not published"
    assert STEPS["best_of_n"].basis == "scaled from published"


def test_totals_add_up_and_name_what_is_missing():
    steps = [
        Step("a", SFTConfig(), 8, 1.0, "published upper bound"),
        Step("b", SFTConfig(), 4, 3.0, "published upper bound"),
        Step("c", SFTConfig(), 1, 30.0, "scaled from published"),
        Step("d", SFTConfig(), 8, None, "not published"),
    ]
    first, second, third = totals(steps)
    assert "50 GPU hours" in first
    assert "20 of them published upper bounds" in first
    assert "30 of them scaled from published ones" in first
    assert second.endswith(": d.")
    assert "None of these hours was measured by us" in third
    assert not any("nothing was published" in line for line in totals(steps[:3]))


def test_settings_are_read_from_the_presets():
    assert "kl_coef=0.123" in settings_text(PPOConfig.paper(kl_coef=0.123))
    assert "total_steps=390" in STEPS["ppo"].settings
    assert "rollout_batch_size=512" in STEPS["ppo"].settings
    assert "beta=0.1" in STEPS["dpo"].settings
    assert "num_samples=1024" in STEPS["best_of_n"].settings
    # Expert iteration is trained with the settings within it; its own of the same names are not used.
    assert "sft: (learning_rate=2e-05" in STEPS["expert_iteration"].settings
    assert STEPS["expert_iteration"].settings.count("learning_rate") == 1


@pytest.mark.parametrize("name", [name for name in STEPS if not name.startswith("(")])
def test_the_train_command_takes_the_commands(name):
    words = shlex.split(command(STEPS[name], Places(policy="P", reward_model="R", out="O")))
    assert words[:4] == ["accelerate", "launch", "--num_processes", str(STEPS[name].gpus)]
    assert words[4:6] == ["-m", "alpacafarm_env.benchmarks.train"]
    options = train.parse(words[6:])
    assert (options.method, options.preset, options.data, options.policy) == (
        name,
        "paper",
        "tatsu-lab/alpaca_farm",
        "P",
    )
    assert options.reward_model == ("R" if STEPS[name].reward else None)
    assert str(options.out) == f"O/{name}"
    assert options.lora == (0 if name in ("best_of_n", "reward_conditioning") else 8)
    # Training all weights keeps float32 masters, so that bfloat16 would take more memory and not less.
    assert options.dtype == ("float32" if name == "reward_conditioning" else "bfloat16")


def test_full_fine_tuning_can_be_asked_for():
    text = command(STEPS["ppo"], Places(lora=0))
    assert "--lora" not in text
    assert "--dtype" not in text


def test_best_of_n_runs_on_one_process():
    assert STEPS["best_of_n"].gpus == 1


def test_the_python_of_the_first_steps_names_what_exists():
    import alpacafarm_env.agents as agents
    from alpacafarm_env.data import load_dataset

    names = {name: getattr(agents, name) for name in ("SFT", "SFTConfig", "RewardModeling", "RewardModelingConfig")}
    for name in ("(SFT 10k)", "(reward model)"):
        code = compile(command(STEPS[name], Places()), name, "eval")
        assert set(code.co_names) <= {
            *names,
            *("load_dataset", "demonstrations", "preferences", "paper", "learn"),
        }
    assert callable(load_dataset)


def test_files_and_print(tmp_path, capsys):
    assert run(tmp_path / "new" / "plan") == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "new" / "plan"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "plan.csv", "plan.md"]
    with (folder / "plan.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == list(STEPS)
    assert rows[-1]["gpu_hours"] == ""
    text = (folder / "plan.md").read_text(encoding="utf-8")
    for row in plan_rows(list(STEPS.values()), Places()):
        assert row["command"] in text
        assert row["command"] in printed
    assert text.count("```sh") == len(STEPS) - 2
    assert "| ppo | 8 | < 16 | published upper bound |" in text
    assert "Nothing was run" in printed


def test_places_are_the_users(tmp_path):
    text = write_plan(tmp_path, Places(policy="my/sft", reward_model="my/rm", out="runs"))
    assert "--policy my/sft --reward-model my/rm --out runs/ppo" in text
