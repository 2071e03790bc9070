"""The main job end to end on a user's own data with tiny random models: files, resume, common random numbers."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from written import rows_of

from alpacafarm_env.agents import PPOConfig, evaluation
from alpacafarm_env.benchmarks.experiment import engine
from alpacafarm_env.benchmarks.experiment.engine import Experiment
from alpacafarm_env.benchmarks.harness.study import run_command
from alpacafarm_env.benchmarks.methods import job, presets
from alpacafarm_env.benchmarks.win_rate_curve.plan import WinRateCurveOptions, make_plans, run
from alpacafarm_env.errors import CheckpointError, DataError

COLUMNS = ["seed", "step", "proxy", "gold", "win_rate_simulated", "win_rate_human", "kl", "length", "finished"]


RESPONSE = 6


@pytest.fixture
def options(own_data, own_models, tmp_path, monkeypatch):
    """Three steps of eight short responses, evaluated after 0, 2 and 3 steps, two seeds, in this process."""
    short = {"sandbox": replace(presets.PRESETS["sandbox"], max_response_tokens=RESPONSE)}
    monkeypatch.setattr(job, "PRESETS", {**presets.PRESETS, **short})
    fields = {"max_response_tokens": RESPONSE}
    monkeypatch.setattr(
        PPOConfig, "sandbox", classmethod(lambda cls, real=PPOConfig.sandbox: replace(real(), **fields))
    )
    models = {"policy": str(own_models[0]), "reward_model": str(own_models[1])}
    sizes = {"seeds": 2, "steps": 3, "evaluate_every": 2, "num_val": 4, "num_eval": 9, "processes": 1}
    ppo = {"rollout_batch_size": 8, "minibatch_size": 4, "learning_rate": 3e-3, "preset": "sandbox"}
    return WinRateCurveOptions(out=tmp_path / "out", data=str(own_data), **models, **sizes, **ppo)


def test_the_whole_command(options, capsys, monkeypatch):
    assert run(options) == 0
    out = options.out
    table = rows_of(out)
    assert list(table[0]) == list(rows_of(out, "val.csv")[0]) == COLUMNS
    assert [(row["seed"], row["step"]) for row in table] == [(s, t) for s in "01" for t in "023"]
    for row in table:
        assert all(math.isnan(float(row[name])) for name in ("gold", "win_rate_simulated", "win_rate_human"))
        assert all(math.isfinite(float(row[name])) for name in ("proxy", "kl", "length", "finished"))
    assert all(abs(float(row["kl"])) < 1e-4 for row in table if row["step"] == "0")
    assert all(abs(float(row["kl"])) > 1e-3 for row in table if row["step"] == "3")
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["complete"]
    assert manifest["facts"]["level"] == "live"
    assert set(manifest["facts"]["chosen_steps"]) == {"0", "1"}
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == len(list(out.glob("*.png"))) == 1  # no win rate, no figure of it
    assert "&lt;b&gt;now&lt;/b&gt;" in page
    assert "<b>now</b>" not in page
    printed = capsys.readouterr()
    assert "KL from SFT" in printed.out
    assert "no gold reward" in printed.out
    assert "seed 1, step 3 of 3: proxy" in printed.err

    # A second call trains nothing and changes no table.
    monkeypatch.setattr(Experiment, "settings", None)
    before = (out / "table.csv").read_bytes()
    assert run(options) == 0
    assert (out / "table.csv").read_bytes() == before


def test_no_table_is_over_two_policies_reward_models_or_data(options, tmp_path, capsys):
    sources = ("policy", "reward_model", "data")
    mine = {name: shutil.copytree(getattr(options, name), tmp_path / name) for name in sources}
    first = replace(options, seeds=1, steps=1, **{name: str(path) for name, path in mine.items()})
    assert run(first) == 0
    table = (first.out / "table.csv").read_bytes()
    for source, name in (("policy", "model.safetensors"), ("reward_model", "model.safetensors"), ("data", "eval.json")):
        file = mine[source] / name
        before = file.read_bytes()
        if name == "eval.json":
            file.write_bytes(before.replace(b" 1", b" one"))
        else:
            weights = {key: value * 1.5 for key, value in load_file(file).items()}
            save_file(weights, file, metadata={"format": "pt"})
        option = {"data": "dataset"}.get(source, source).replace("_", "-")
        with pytest.raises(CheckpointError, match=f"{name} of --{option}"):
            run(replace(first, seeds=2))
        file.write_bytes(before)
    assert (first.out / "table.csv").read_bytes() == table
    # What it was made from is still the same study, wherever it lies.
    capsys.readouterr()
    assert run(replace(options, seeds=2, steps=1)) == 0
    assert "seed 0, step 1" not in capsys.readouterr().err
    assert [row["seed"] for row in rows_of(first.out)] == ["0", "0", "1", "1"]


def test_a_folder_has_one_setting_and_the_instructions_there_are(options):
    run(replace(options, seeds=1, steps=1, num_eval=100_000))
    manifest = json.loads((options.out / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["config"]["num_val"], manifest["config"]["num_eval"]) == (4, 16)
    assert run(replace(options, seeds=1, steps=1, num_eval=805)) == 0  # the same study
    with pytest.raises(CheckpointError, match=r"settings: steps was 1, is 2; ppo\.total_steps was 1, is 2\. Choose"):
        run(replace(options, seeds=1, steps=2, num_eval=805))


def test_a_damaged_evaluation_is_named(options):
    options = replace(options, seeds=1, steps=1)
    assert run(options) == 0
    file = make_plans(options)[0].evaluation_file(1)
    for content in ("", "[1]", "{}", '{"rows": [{"a": 1}], "splits": {}}', None):
        file.unlink() if content is None else file.write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"step-00001\.json.*remove .*seed-0"):
            run(options)


def test_an_interrupted_seed_continues_with_the_same_bytes(options, tmp_path, monkeypatch):
    plan, whole, told = make_plans(options)[0], tmp_path / "whole", []
    rows = engine.run(plan, told.append)
    plan.folder.rename(whole)
    write = engine.write_evaluation

    def stop(plan, place, *content):
        if place == 2:  # its checkpoint is on disk already, its evaluation is not
            raise KeyboardInterrupt
        write(plan, place, *content)

    with monkeypatch.context() as context:
        context.setattr(engine, "write_evaluation", stop)
        with pytest.raises(KeyboardInterrupt):
            engine.run(plan, told.append)
    again = engine.run(plan, told.append)
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in rows]
    for path in sorted((whole / "evaluations").iterdir()):
        assert (plan.folder / "evaluations" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(CheckpointError, match="num_eval|splits"):
        engine.run(replace(plan, splits=(("val", 4), ("eval", 3))), told.append)


def test_evaluations_of_a_seed_share_their_random_numbers(options):
    plan = make_plans(options)[0]
    policy, instructions = plan.policy(), plan.data.instructions("eval")

    def texts(seed, split):
        return evaluation.answer(policy, instructions, seed=seed, split=split, temperature=0.7).texts

    assert texts(0, "eval") == texts(0, "eval")
    assert texts(0, "eval") != texts(1, "eval")
    assert texts(0, "eval") != texts(0, "val")


def test_kl_is_of_the_tempered_distributions(options):
    plan = make_plans(options)[0]
    policy = plan.policy()
    policy.add_reference()
    policy.model.lm_head.weight.data *= 1.3
    seeded = torch.Generator().manual_seed(0)
    rollouts = policy.generate(plan.data.instructions("eval"), generator=seeded, temperature=0.7, max_new_tokens=5)
    kl = evaluation.sequence_kl(policy, rollouts, 0.7, max_tokens=64)
    with torch.no_grad():
        ours, theirs = (policy.logprobs(rollouts, role=role, temperature=0.7) for role in ("policy", "reference"))
    expected = torch.stack([part.sum() for part in (ours - theirs).split(rollouts.lengths.tolist())])
    assert torch.allclose(kl, expected, atol=1e-4)
    assert kl.abs().max() > 0.05


def test_a_plan_follows_its_options(own_models):
    own = WinRateCurveOptions.parse(["--policy", str(own_models[0]), "--steps", "7", "--evaluate-every", "3"])
    (plan, *_) = make_plans(own)
    assert plan.preset == "sandbox"  # by its size
    assert (plan.places, plan.config(PPOConfig).total_steps) == ((0, 3, 6, 7), 7)


def test_command_line(capsys):
    quick, usual = WinRateCurveOptions.parse(["--quick"]), WinRateCurveOptions.parse([])
    assert (quick.quick, usual.quick) == (True, False)
    assert quick.seeds < usual.seeds
    assert quick.steps < usual.steps
    assert WinRateCurveOptions.parse(["--quick", "--seeds", "5"]).seeds == 5
    assert WinRateCurveOptions.parse(["--dataset", "x"]).data == WinRateCurveOptions.parse(["--data", "x"]).data == "x"


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"evaluate_every": 0}, {"seeds": 0}, {"max_prompt_tokens": 0}, {"temperature": 0.0}]
)
def test_wrong_numbers_are_named(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: expected"):
        WinRateCurveOptions(**wrong)


def test_what_training_leaves_out_is_answered(options):
    with pytest.warns(UserWarning, match=r"16 prompts .* more than 45 tokens"):
        assert run(replace(options, seeds=1, steps=1, max_prompt_tokens=45)) == 0
    evaluation = json.loads((options.out / "runs" / "seed-0" / "evaluations" / "step-00001.json").read_text())
    assert [row["split"] for row in evaluation["rows"] if row["length"] > 0] == ["val", "eval"]


@pytest.mark.parametrize("option", ["policy", "reward_model"])
@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_a_missing_model_is_refused_before_anything_is_written(options, tmp_path, capsys, option, kind):
    wrong = tmp_path / kind
    if kind == "empty":
        wrong.mkdir()
    assert run_command(lambda: run(replace(options, **{option: str(wrong)}))) == 2
    assert str(wrong) in capsys.readouterr().err
    assert not options.out.exists()


def test_own_data_needs_own_models(own_data):
    with pytest.raises(DataError, match="--policy and --reward-model"):
        make_plans(WinRateCurveOptions(data=str(own_data), policy="p"))
    with pytest.raises(ValueError, match="--policy"):
        WinRateCurveOptions(template="alpaca")
