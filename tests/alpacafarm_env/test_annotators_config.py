"""Pools, prompts and lists of models as files: what comes with the package, and what a user's own file is told."""

import json
import re
import time
from hashlib import sha256

import pytest
import yaml

from alpacafarm_env.annotators import config
from alpacafarm_env.annotators.config import ModelConfig, PoolConfig, load_models, load_pool, load_prompt, names
from alpacafarm_env.errors import PoolError

GOOD = {"name": "quick", "role": "chatgpt", "prompt": "chatgpt_4", "max_tokens": 20}


def _pool_file(folder, content, name="pool.yaml"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def _error(load, *args, **kwargs):
    start = time.process_time()
    with pytest.raises(PoolError) as caught:
        load(*args, **kwargs)
    assert time.process_time() - start < 2
    return str(caught.value)


def test_the_papers_pool_and_prompts_are_unchanged():
    """Twelve prompts for thirteen annotators; any change must be meant."""
    pool = load_pool("alpaca_farm")
    assert [member.name for member in pool.annotators] == [
        *(
            f"{role}_{n}"
            for role, count in (("gpt4", 5), ("chatgpt", 4), ("davinci003", 4))
            for n in range(1, count + 1)
        )
    ]
    assert {(member.temperature, member.top_p) for member in pool.annotators} == {(1.0, 1.0)}
    assert [member.batch_size for member in pool.annotators] == [4, 5, 5, 1, 5, 1, 1, 1, 1, 4, 1, 5, 1]
    assert len({load_prompt(member.prompt).digest for member in pool.annotators}) == 12
    assert len({load_prompt(name).digest for name in names("prompts")}) == len(names("prompts")) == 16
    assert {member.name for member in pool.annotators if member.prompt == "gpt4_4"} == {"gpt4_4", "chatgpt_3"}
    digests = " ".join(load_prompt(name).digest for name in names("prompts"))
    assert sha256(digests.encode()).hexdigest()[:16] == "b01c9215ba25f114"


def test_raters_and_judges_are_not_confused():
    judges, raters = load_pool("greedy"), load_pool("raters")
    config.check_form(judges, rates=False)
    config.check_form(raters, rates=True)
    both = PoolConfig(name="both", annotators=(*judges.annotators, *raters.annotators))
    for pool, rates, named in ((judges, True, "greedy_gpt4"), (raters, False, "gpt4_1"), (both, True, "greedy_gpt4")):
        assert f"'{named}'" in _error(config.check_form, pool, rates=rates)
    assert "flip" in _error(config.check_form, raters.model_copy(update={"flip": 0.25}), rates=True)


def test_a_pools_draws_have_a_name(tmp_path):
    assert {name: load_pool(name).stream for name in names("pools")} == {
        "alpaca_farm": "sim_eval",
        "ann": "sim_eval",
        "eval": "sim_eval",
        "greedy": "sim_gpt4",
        "raters": "sim_eval",
        "weighted": "weighted",
    }
    base = {"name": "base", "annotators": [GOOD]}
    _pool_file(tmp_path, base)
    shared = _pool_file(tmp_path, {"name": "shared", "annotators_of": "./pool.yaml"}, "shared.yaml")
    own = _pool_file(tmp_path, {"name": "own", "draws": "mine", "annotators_of": "./pool.yaml"}, "own.yaml")
    assert (load_pool(shared).stream, load_pool(own).stream) == ("base", "mine")
    _pool_file(tmp_path, {**base, "draws": "told"})
    assert (load_pool(shared).stream, load_pool(own).stream) == ("told", "mine")
    assert PoolConfig(**load_pool(shared).model_dump(exclude={"annotators_of"})).stream == "told"


def test_shared_members_keep_their_prompts_paths(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "mine.yaml").write_text((config._FOLDER / "prompts/chatgpt_4.yaml").read_text("utf-8"), encoding="utf-8")
    _pool_file(inner, {"name": "base", "annotators": [{**GOOD, "prompt": "./mine.yaml"}]})
    outer = load_pool(str(_pool_file(tmp_path, {"name": "noisy", "flip": 0.1, "annotators_of": "inner/pool.yaml"})))
    assert (outer.name, outer.flip, outer.annotators[0].prompt) == ("noisy", 0.1, str((inner / "mine.yaml").resolve()))


def test_all_mistakes_of_a_pool_are_listed(tmp_path):
    wrong = [{"batch_sise": 5}, {"name": "b", "max_tokens": "20"}, {"name": "c", "role": None}]
    members = [GOOD | each for each in wrong]
    path = _pool_file(tmp_path, {"name": "mine", "flip": 0.7, "descripton": "x", "annotators": members})
    first, *lines = _error(load_pool, path).splitlines()
    assert first == f"{path}:"
    told = {
        "flip": "0.7",
        "descripton": "'description'",
        "annotators.0.batch_sise": "'batch_size'",
        "annotators.1.max_tokens": "'20'",
        "annotators.2.role": "None",
    }
    assert {
        field: told[field] in line for line in lines for field in [line.strip().partition(":")[0]]
    } == dict.fromkeys(told, True)


def test_a_wrong_prompt_of_a_pool_is_named(tmp_path):
    (tmp_path / "p.yaml").write_text("name: p\nformat: label\nlayout: chat\nparts: [{user: x, itms: true}]", "utf-8")
    for change, fact in (
        ({"prompt": "gtp4_3"}, "'gtp4_3'.*'gpt4_3'"),
        ({"prompt": "gpt4_4", "batch_size": 5}, "batch_size.*'gpt4_4'"),
        ({"prompt": "./no.yaml"}, r"no\.yaml"),
        ({"prompt": "./p.yaml"}, r"parts\.0\.itms: .*'items'"),
    ):
        message = _error(load_pool, _pool_file(tmp_path, {"name": "mine", "annotators": [GOOD | change]}))
        assert re.search(fact, message)


NO_POOL = {  # a part of what is said -> files
    "expected YAML": [
        "name: [",
        "name: !!python/object/apply:os.system [id]",
        *('"!'[n] * 60_000 for n in (0, 1)),
        *("[" * 5000, "{" * 5000, "? " * 30_000),
    ],
    "'name'.* twice": ["name: mine\nname: yours\nannotators_of: eval"],
    "aliases": ["name: &x mine\ndescription: *x\nannotators_of: eval"],
    "`annotators`": ["name: mine\nannotators: []"],
    "'eval'": ["name: mine\nannotators_of: evl"],
    "leads back": ["name: mine\nannotators_of: ./pool.yaml"],
    "dictionary": ["", "- a", "- 1\n" * 16_000],
    "65536 bytes": ["#" * (config.MAX_BYTES + 1)],
    "quick": [f"name: mine\nannotators: [{json.dumps(GOOD)}, {json.dumps(GOOD)}]"],
}


@pytest.mark.parametrize("said", NO_POOL)
def test_files_that_are_no_pool(tmp_path, said):
    for content in NO_POOL[said]:
        path = _pool_file(tmp_path, content)
        message = _error(load_pool, path)
        assert re.search(said, message)
        assert str(path) in message or said == "'eval'"
        assert len(message) < 2000


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "pool.yaml"
    path.write_bytes(b"name: \xff\xfe")
    assert "expected YAML" in _error(load_pool, path)
    assert "cannot be read (Is a directory)" in _error(load_pool, tmp_path)
    assert "Unknown pool 'alpaca_frm'. Did you mean 'alpaca_farm'?" in _error(load_pool, "alpaca_frm")


NO_PROMPT = {  # the same, of prompts that do not hold together
    "parts: ": [{"parts": []}],
    "format: .*'logprobs'.*'labels'": [{"format": "labels"}],
    "`items: true` .* 0 times": [{"parts": [{"user": "x"}]}],
    "`items: true` .* 2 times": [{"parts": [{"items": True}, {"items": True}]}],
    r"parts\.0\.items: .*False": [{"parts": [{"items": False}]}],
    r"parts\.0: ": [{"parts": [{"items": True, "user": "x"}]}, {"parts": [{}]}],
    "`user`": [{"parts": [{"items": True}, {"assistant": "x"}]}],
    "`system`": [{"parts": [{"user": "x"}, {"system": "y"}, {"items": True}]}],
    "one text": [{"layout": "completion", "parts": [{"system": "y"}, {"items": True}]}],
    r"parts\.0\.pairs\.0\.second": [{"parts": [{"pairs": [{"instruction": "i", "first": "x"}]}, {"items": True}]}],
    r"parts\.0\.user: ": [{"parts": [{"user": ""}, {"items": True}]}],
}


@pytest.mark.parametrize("said", NO_PROMPT)
def test_prompts_that_do_not_hold_together(tmp_path, said):
    for change in NO_PROMPT[said]:
        content = {"name": "p", "format": "label", "layout": "chat", "parts": [{"items": True}], **change}
        assert re.search(said, _error(load_prompt, _pool_file(tmp_path, content)))


def test_lists_of_models():
    openai = load_models("openai")
    assert {role: model.model for role, model in openai.items()} == {
        "gpt4": "gpt-4.1",
        "chatgpt": "gpt-4.1-mini",
        "davinci003": "gpt-4.1-nano",
    }
    assert {model.kind for model in openai.values()} == {"chat"}
    assert [m.kind for m in load_models("sandbox").values()] == ["chat", "chat", "completion"]
    assert list(load_models("openai", ["chatgpt"])) == ["chatgpt"]


def test_one_model_for_all_roles(tmp_path):
    expected = dict.fromkeys(("mine", "yours"), ModelConfig(model="llama-3", kind="completion"))
    fields = {"model": "llama-3", "kind": "completion"}
    for spec in (fields, ModelConfig(**fields), _pool_file(tmp_path, fields), str(tmp_path / "pool.yaml")):
        assert load_models(spec, ("mine", "yours")) == expected
    assert load_models("model=llama-3")["gpt4"] == ModelConfig(model="llama-3")


def test_reasoning_models_get_their_settings_unless_given():
    model = load_models("model=gpt-5-mini")["gpt4"]
    assert (model.max_tokens_field, model.omit, model.extra_tokens) == (
        "max_completion_tokens",
        ("temperature", "top_p"),
        4000,
    )
    assert load_models({"model": "o4-mini", "extra_tokens": 9})["gpt4"].extra_tokens == 9
    assert load_models("model=gpt-4.1")["gpt4"].max_tokens_field == "max_tokens"


def test_wrong_lists_of_models(tmp_path):
    by_role = {"gpt4": {"modl": "x"}, "chatgpt": 3, "davinci003": {"model": "m", "omit": ["heat"], "kind": "chart"}}
    for spec, *told in (
        ({"gpt4": "x", "chatgpt": "y"}, "davinci003"),
        (by_role, "modl: .*'model'", "chatgpt: ", r"omit\.0: ", "kind: .*'chart'"),
        ({"model": "m", "price_usd_per_million": [1, -2]}, r"price_usd_per_million\.1: "),
        ("opnai", "'openai'"),
        (_pool_file(tmp_path, "[1, 2]"), "list"),
    ):
        message = _error(load_models, spec)
        assert all(re.search(each, message) for each in told)
