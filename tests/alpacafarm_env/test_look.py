"""The page about runs: what it finds, reads, keeps within bounds, and never runs."""

import gzip
import json
import math
import os
import re
from dataclasses import replace

import gymnasium as gym
import pytest

import alpacafarm_env.look.runs as reading
from alpacafarm_env import sandbox
from alpacafarm_env.__main__ import main
from alpacafarm_env.agents import PPO, PPOConfig
from alpacafarm_env.look.runs import PANELS, find_runs, read_runs, thinned
from alpacafarm_env.wrappers.vector import AddScore, SurrogateReward

HOSTILE = "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\">\u2028&amp;"
PROXY, GOLD = 0, 1


def rollout(step, number=0, **changes):
    row = {"step": step, "instruction": f"Ask {number}", "response": f"say {step}.{number}", "score": float(number)}
    return {**row, "tokens": 3, "finished": True, "info": {"gold_reward": -float(number)}, **changes}


def make_run(folder, steps=3, rows=None, **metrics):
    """A run's folder as agents leave it; a list of `rows` replaces the kept responses."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"step": step, "score/mean": step / 2, "kl/k1": step * 1.0, **metrics} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [rollout(step, number) for step in range(1, steps + 1) for number in range(2)] if rows is None else rows
    members = [gzip.compress((json.dumps(row) + "\n").encode()) for row in rows]
    if members:
        (folder / "rollouts.jsonl.gz").write_bytes(b"".join(members))
    return folder


def make_trl(folder, steps=2, *, functions=("alpacafarm", "gold_reward"), chat=False, state="checkpoint-2"):
    """TRL's output_dir with log_completions=True: reward functions' columns between completion and advantage."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    (folder / "completions").mkdir(parents=True)
    for step in range(1, steps + 1):
        texts = ["yes", HOSTILE]
        prompts = [[{"role": "user", "content": "Ask"}] if chat else "Ask"] * 2
        said = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
        rewards = {name: [step + number, math.nan] for number, name in enumerate(functions)}
        table = {"step": [step] * 2, "prompt": prompts, "completion": said, **rewards, "advantage": [0.5, -0.5]}
        pandas.DataFrame(table).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    means = {f"rewards/{name}/mean": 1.0 for name in functions}
    means |= {"kl": 0.1, "completions/mean_length": 9.0}
    log = [{"step": step, "reward": step * 1.5, **means} for step in range(1, steps + 1)]
    log.append({"step": steps, "train_runtime": 2.0})
    (folder / state).mkdir(exist_ok=True)
    (folder / state / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return folder


def read(*roots, most_bytes=1e7):
    return {run.name: run for run in read_runs(find_runs(roots), most_bytes=most_bytes)}


def curve(run, metric):
    (found,) = (each for each in run.curves if each["metric"] == metric)
    return found


def data_of(page):
    """What the page's script reads, as a browser would cut it out."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def test_a_trained_agents_run_is_shown_whole(tmp_path, capsys):
    sizes = {"total_steps": 2, "rollout_batch_size": 8, "minibatch_size": 8, "keep_rollouts": 5}
    envs = gym.make_vec("AlpacaFarm-PPO-v0", 8, autoreset_mode="Disabled")
    envs = AddScore(SurrogateReward(envs), key="gold_reward", oracle="gold")
    config = replace(PPOConfig.sandbox(), **sizes)
    agent = PPO(envs, sandbox.POLICY, value_init=sandbox.REWARD_MODEL, config=config, out=tmp_path / "run")
    told = list(agent.updates())
    out = tmp_path / "page.html"
    assert main(["look", str(tmp_path / "run"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert str(out) in printed
    assert {"runs: 1", "steps: 2", "texts: 10"} <= set(re.findall(r"\w+: \d+", printed))
    (run,) = data_of(out)["runs"]
    assert run["steps"] == [1, 2]
    titles = {each["metric"]: PANELS[each["panel"]][:2] for each in run["curves"]}
    assert titles["score/mean"][1] == titles["info/gold_reward"][1] == "reward units"
    assert (titles["kl/k1"][1], titles["tokens/mean"][1]) == ("nats a response", "tokens")
    for each in run["curves"]:
        assert each["values"] == pytest.approx([metrics[each["metric"]] for metrics in told], rel=1e-5)
    with gzip.open(tmp_path / "run" / "rollouts.jsonl.gz", "rt") as file:
        kept = [json.loads(line) for line in file]
    shown = [(int(step), row["response"], row["gold"]) for step, rows in run["texts"].items() for row in rows]
    assert [each[:2] for each in shown] == [(row["step"], row["response"]) for row in kept]
    assert [each[2] for each in shown] == pytest.approx([row["info"]["gold_reward"] for row in kept], rel=1e-5)
    assert run["notes"] == []


def test_runs_are_found_below_and_named_by_their_path(tmp_path):
    study = tmp_path / "study"
    for place in ("runs/a", "runs/b", "runs/b/round-1/sft", "runs/b/checkpoint-4"):
        make_run(study / place)
    (study / "cells").mkdir()
    assert find_runs([study]) == {"runs/a": study / "runs/a", "runs/b": study / "runs/b"}
    assert list(find_runs([study / "runs/a"])) == ["a"]
    assert list(find_runs([study / "runs/a", study])) == ["a", "study/runs/b"]
    assert list(find_runs([study / "runs/b/round-1/sft"])) == ["sft"]  # as it was named
    other = make_run(tmp_path / "other" / "a")
    assert set(find_runs([study / "runs/a", other]).values()) == {study / "runs/a", other}


def test_expert_iteration_has_best_and_mean(tmp_path):
    folder = make_run(tmp_path / "run", rows=[rollout(1, response=None, score=None, info={"mean_reward": 2.0})])
    lines = [{"step": 1, "reward/best": 2.0, "reward/mean": 1.0}, {"step": 2, "loss": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read(folder)["run"]
    assert curve(run, "reward/best") == {"panel": PROXY, "metric": "reward/best", "values": [2.0, None]}
    assert curve(run, "reward/mean")["panel"] == PROXY
    (row,) = run.texts[1]
    assert (row["response"], row["score"], row["gold"], row["info"]) == (None, None, None, {"mean_reward": 2.0})
    assert any("gold" in note for note in run.notes)


@pytest.mark.parametrize("name", ["gold", "gold_reward", "reward_components/gold"])
def test_gold_is_known_by_its_name_and_its_parts_are_not_gold(tmp_path, name):
    rows = [rollout(1, info={"gold_complete": 0.5, name: 7.0, "other": 2.0})]
    more = {"info/gold_complete": 0.5, f"info/{name}": 7.0, "reward/mean": 1.0}
    run = read(make_run(tmp_path / "run", rows=rows, **more))["run"]
    assert [each["metric"] for each in run.curves if each["panel"] == GOLD] == [f"info/{name}"]
    assert run.texts[1][0]["gold"] == 7.0
    assert run.texts[1][0]["info"] == {"gold_complete": 0.5, "other": 2.0}


@pytest.mark.parametrize("chat", [False, True])
def test_trls_completions_and_log_are_read(tmp_path, chat):
    run = read(make_trl(tmp_path / "trl", chat=chat))["trl"]
    assert run.steps == [1, 2]
    assert curve(run, "reward")["values"] == [1.5, 3.0]
    assert PANELS[curve(run, "kl")["panel"]][1] == "nats a token"
    assert curve(run, "rewards/gold_reward/mean")["panel"] == GOLD
    first, second = run.texts[2]
    assert (first["instruction"], first["response"]) == ("Ask", "yes")
    assert (first["score"], first["gold"], first["info"]) == (2.0, 3.0, {"advantage": 0.5})
    assert (second["response"], second["score"], second["gold"]) == (HOSTILE, None, None)


def test_of_more_reward_functions_the_score_is_their_sum_and_the_page_says_so(tmp_path):
    run = read(make_trl(tmp_path / "trl", functions=("one", "two", "my_gold")))["trl"]
    assert run.texts[1][0]["score"] == 1.0 + 2.0
    assert run.texts[1][0]["info"] == {"one": 1.0, "two": 2.0, "advantage": 0.5}
    assert sum("one, two" in note for note in run.notes) == 1


def test_trls_newest_checkpoint_is_read(tmp_path):
    folder = make_trl(tmp_path / "trl", steps=12, state="checkpoint-12")
    (folder / "checkpoint-6").mkdir()
    (folder / "checkpoint-6" / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 6, "reward": 0}]}))
    run = read(folder)["trl"]
    assert run.steps == list(range(1, 13))
    (folder / "checkpoint-12" / "trainer_state.json").write_text("{")
    (folder / "completions" / "completions_00012.parquet").write_bytes(b"PAR1 half")
    broken = read(folder)["trl"]
    assert (broken.steps, list(broken.texts)) == ([6], list(range(1, 12)))
    assert len(broken.notes) == len(run.notes) + 2


def test_what_a_killed_run_left_is_shown_and_told(tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "score/m')
    rollouts = folder / "rollouts.jsonl.gz"
    member = gzip.compress((json.dumps(rollout(9, response=os.urandom(4000).hex())) + "\n").encode())
    rollouts.write_bytes(rollouts.read_bytes() + member[: len(member) // 2])
    (folder / "warnings.jsonl").write_text('{"step": 2, "signal": "length", "text": "longer"}\n{"step": "x"}\n')
    run = read(folder)["run"]
    assert run.steps == [1, 2, 3]
    assert {step: len(rows) for step, rows in run.texts.items()} == {1: 2, 2: 2, 3: 2}
    assert run.warnings == [{"step": 2, "signal": "length", "text": "longer"}]
    for name in ("metrics.jsonl", "rollouts.jsonl.gz", "warnings.jsonl"):
        assert sum(f"{name}: 1" in note for note in run.notes) == 1


def test_numbers_that_json_does_not_have_are_unknown(tmp_path):
    folder = make_run(tmp_path / "run", rows=[rollout(1, info={"gold_reward": math.nan})], **{"kl/k3": math.inf})
    out = tmp_path / "page.html"
    assert main(["look", str(folder), "--out", str(out)]) == 0
    (run,) = data_of(out)["runs"]
    assert run["texts"]["1"][0]["gold"] is None
    assert [each["values"] for each in run["curves"] if each["metric"] == "kl/k3"] == [[None] * 3]


def test_texts_stay_within_their_share_and_the_last_step_is_there(tmp_path, capsys):
    rows = [rollout(step, number, response="x" * 1000) for step in range(1, 41) for number in range(4)]
    folder = make_run(tmp_path / "long", steps=40, rows=rows)
    small = make_run(tmp_path / "small")
    runs = read(folder, small, most_bytes=40_000)
    held = {name: len(json.dumps(run.texts)) for name, run in runs.items()}
    assert held["long"] < 22_000
    assert (len(runs["small"].texts), runs["small"].notes) == (3, [])
    assert list(runs["long"].texts) == [1, 17, 33, 40]
    assert runs["long"].steps == list(range(1, 41))
    out = tmp_path / "page.html"
    assert main(["look", str(folder), str(small), "--texts-mb", "0.04", "--out", str(out)]) == 0
    assert "one step in 16" in capsys.readouterr().out
    assert "one step in 16" in out.read_text().partition('id="data"')[0]


def test_steps_that_are_too_large_keep_their_first_texts():
    rows = [(step, {"response": "x" * 100, "number": number}) for step in range(4) for number in range(50)]
    kept, every, cut = thinned(iter(rows), 2_000)
    assert [[row["number"] for row in each] for each in kept.values()] == [list(range(7))] * len(kept)
    assert list(kept) == [0, 3]
    assert (every, cut) == (4, 2 * 43)
    assert thinned(rows, math.inf)[1:] == (1, 0)


def test_curves_have_a_bound_too(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_POINTS", 20)
    run = read(make_run(tmp_path / "run", steps=100, rows=[]))["run"]
    assert run.steps == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
    assert curve(run, "score/mean")["values"] == [step / 2 for step in run.steps]
    assert any("one step in 10" in note for note in run.notes)


def test_texts_are_data_and_never_markup(tmp_path):
    folder = make_run(tmp_path / "<b>run", rows=[rollout(1, response=HOSTILE, instruction=HOSTILE, info={})])
    (folder / "warnings.jsonl").write_text(json.dumps({"step": 1, "signal": HOSTILE, "text": HOSTILE}) + "\n")
    out = tmp_path / "page.html"
    assert main(["look", str(folder), "--out", str(out)]) == 0
    page = out.read_text()
    assert "&lt;b&gt;run" in page  # in the note that it has no gold
    assert page.count("<script") == page.count("</script>") == 2
    assert not any(each in page for each in ("<img", "<b>", "\u2028"))
    (run,) = data_of(out)["runs"]
    assert run["texts"]["1"][0]["response"] == run["warnings"][0]["text"] == HOSTILE
    ours = page.replace(re.search(r'id="data">.*?</script>', page, re.DOTALL)[0], "")
    assert not re.search(r"""(?:src|href)=(?!"data:)|https?://(?!www\.w3\.org)|innerHTML""", ours)


def test_what_cannot_be_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run", rows=[])
    (tmp_path / "empty").mkdir()
    mine = tmp_path / "mine.html"
    mine.write_text("<html>mine</html>")
    wrong = {
        "RUN": [],
        "nowhere": ["nowhere"],
        "metrics.jsonl": ["empty"],
        "a file": ["mine.html"],
        "mine.html": ["run", "--out", "mine.html"],
        "folder": ["run", "--out", "empty"],
    }
    for words, args in wrong.items():
        assert main(["look", *args]) == 2
        assert words in capsys.readouterr().err
    assert mine.read_text() == "<html>mine</html>"
    assert not (tmp_path / "look.html").exists()
    assert main(["look", "run"]) == 0
    assert "keep_rollouts" in capsys.readouterr().out
    make_run(run, steps=5)
    assert main(["look", "run"]) == 0  # its own page is written over
    assert data_of(tmp_path / "look.html")["runs"][0]["steps"] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as driver:
        try:
            path = os.environ.get("ALPACAFARM_CHROMIUM")
            opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_sorts_filters_and_compares(browser, tmp_path, width):
    told = {"a": (3.0, 1.0), "b": (2.0, 2.0), "c": (1.0, 3.0), "d": (None, 9.0), HOSTILE + "long" * 99: (0.0, 0.0)}
    rows = [
        rollout(step, response=f"{text} at {step}", score=score, info={"gold_reward": gold, "other": -gold})
        for step in (1, 2)
        for text, (score, gold) in told.items()
    ]
    folder = make_run(tmp_path / ("run" * 30), rows=rows, **{"info/gold_reward": 1.0})
    (folder / "warnings.jsonl").write_text(json.dumps({"step": 2, "signal": HOSTILE, "text": "long" * 99}) + "\n")
    out = tmp_path / "page.html"
    assert main(["look", str(folder), "--out", str(out)]) == 0
    page = browser.new_page(viewport={"width": width, "height": 844})
    problems, asked = [], []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(out.as_uri())

    def order(step):
        texts = page.locator(".said").evaluate_all("all => all.map(each => each.textContent)")
        return "".join(text[0] for text in texts if text.endswith(f"at {step}"))

    assert (order(1), order(2)) == ("ab<cd", "ab<cd")  # rank gaps 2.., 0, 0, -2, none
    for key, highest in {"score": "abc<d", "gold": "dcba<", "info:other": "<abcd"}.items():
        page.locator("#sort").select_option(key)
        assert order(1) == highest
    page.locator("#order").select_option("1")
    assert order(2) == "dcba<"
    page.locator("#find").fill("LONG")
    assert order(1) == "<"
    page.locator("#find").fill("")
    page.locator("#sides select").nth(1).select_option("2")
    assert (order(1), order(2)) == ("", "ddccbbaa<<")
    assert page.locator("svg .warning").count() == page.locator("svg").count() > 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator("svg text").evaluate_all("all => all.map(each => each.getBoundingClientRect().toJSON())")
    assert all(0 <= box["left"] < box["right"] <= width for box in boxes)
    page.get_by_role("checkbox").first.uncheck()
    assert page.locator("svg").count() == 0
    assert (problems, asked, page.title()) == ([], [out.as_uri()], "Runs")
