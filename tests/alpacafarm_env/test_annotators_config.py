"""Pools, prompts and lists of models as files: what comes with the package, and what a user's own file is told."""

import json
import re
import time
from hashlib import sha256

import pytest
import yaml

from alpacafarm_env.annotators import config, strict_yaml
from alpacafarm_env.annotators.config import ModelConfig, PoolConfig, load_models, load_pool, load_prompt, names
from alpacafarm_env.annotators.prompts import Item, render
from alpacafarm_env.errors import PoolError

# Dubois et al. 2023's annotators: role, format, layout, turns, sizes of the batches of examples, pairs asked at once,
# longest reply, characters of the prompt.
PAPER = {
    "gpt4_1": ("gpt4", "json", "chat", "many", (1, 2), 4, 600, 3423),
    "gpt4_2": ("gpt4", "lines", "chat", "one", (1, 3), 5, 250, 6849),
    "gpt4_3": ("gpt4", "lines", "chat", "one", (1, 3), 5, 250, 6700),
    "gpt4_4": ("gpt4", "label", "chat", "many", (1,) * 6, 1, 20, 5869),
    "gpt4_5": ("gpt4", "lines", "chat", "one", (1, 3), 5, 250, 6797),
    "chatgpt_1": ("chatgpt", "label", "chat", "one", (1, 1), 1, 50, 3721),
    "chatgpt_2": ("chatgpt", "json", "chat", "many", (1,) * 3, 1, 150, 2475),
    "chatgpt_3": ("chatgpt", "label", "chat", "many", (1,) * 6, 1, 20, 5869),
    "chatgpt_4": ("chatgpt", "label", "chat", "many", (1, 1), 1, 20, 1650),
    "davinci003_1": ("davinci003", "lines", "completion", "one", (1, 5), 4, 200, 5932),
    "davinci003_2": ("davinci003", "label", "completion", "one", (1,) * 6, 1, 200, 3969),
    "davinci003_3": ("davinci003", "lines", "completion", "one", (1, 5), 5, 200, 5370),
    "davinci003_4": ("davinci003", "label", "completion", "one", (1, 1), 1, 200, 1016),
}
GOOD = {"name": "quick", "role": "chatgpt", "prompt": "chatgpt_4", "max_tokens": 20}


def _pool_file(folder, content, name="pool.yaml"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def _load_annotator(path):
    """The file's only annotator, as the second of a pool."""
    members = [GOOD | {"name": "fine"}, yaml.safe_load(path.read_text("utf-8"))]
    return load_pool(_pool_file(path.parent, {"name": "mine", "annotators": members}, "two.yaml"))


def _pair(text):
    return dict.fromkeys(("instruction", "first", "second"), text)


def _error(load, *args, **kwargs):
    start = time.process_time()
    with pytest.raises(PoolError) as caught:
        load(*args, **kwargs)
    assert time.process_time() - start < 2
    return str(caught.value)


def test_the_pool_has_the_papers_thirteen_in_order():
    assert [member.name for member in load_pool("alpaca_farm").annotators] == list(PAPER)


@pytest.mark.parametrize("member", load_pool("alpaca_farm").annotators, ids=lambda member: member.name)
def test_each_annotator_is_built_as_the_papers(member):
    prompt = load_prompt(member.prompt)
    turns = "many" if any(part.assistant for part in prompt.parts) else "one"
    batches = tuple(len(part.pairs) for part in prompt.parts if part.pairs)
    found = (member.role, prompt.format, prompt.layout, turns, batches, member.batch_size, member.max_tokens)
    *expected, size = PAPER[member.name]
    assert found == tuple(expected)
    assert (member.temperature, member.top_p) == (1.0, 1.0)
    assert 0.3 * size < len(render(prompt, [Item("", "", "")], "completion")) < size


def test_the_twelve_prompts_differ_and_two_annotators_share_one():
    pool = load_pool("alpaca_farm")
    assert len({load_prompt(member.prompt).digest for member in pool.annotators}) == 12
    assert len({load_prompt(name).digest for name in names("prompts")}) == len(names("prompts")) == 16
    assert {member.name for member in pool.annotators if member.prompt == "gpt4_4"} == {"gpt4_4", "chatgpt_3"}
    digests = " ".join(load_prompt(name).digest for name in names("prompts"))
    assert sha256(digests.encode()).hexdigest()[:16] == "b01c9215ba25f114"  # any change must be meant


def test_raters_and_judges_are_not_confused():
    judges, raters = load_pool("greedy"), load_pool("raters")
    config.check_form(judges, rates=False)
    config.check_form(raters, rates=True)
    both = PoolConfig(name="both", annotators=(*judges.annotators, *raters.annotators))
    for pool, rates, named in ((judges, True, "greedy_gpt4"), (raters, False, "gpt4_1"), (both, True, "greedy_gpt4")):
        assert f"'{named}'" in _error(config.check_form, pool, rates=rates)
    assert "flip" in _error(config.check_form, raters.model_copy(update={"flip": 0.25}), rates=True)


def test_a_digest_is_of_what_is_sent():
    prompt = load_prompt("chatgpt_4")
    renamed = prompt.model_copy(update={"name": "other", "description": "Another."})
    assert config.Prompt(**renamed.model_dump()).digest == prompt.digest
    shorter = config.Prompt(**{**prompt.model_dump(), "parts": prompt.model_dump()["parts"][1:]})
    assert shorter.digest != prompt.digest


def test_the_other_pools():
    members = load_pool("alpaca_farm").annotators
    assert (load_pool("eval").flip, load_pool("eval").annotators) == (0, members)
    assert (load_pool("ann").flip, load_pool("ann").annotators) == (0.25, members)
    assert [(m.name, m.batch_size, m.temperature) for m in load_pool("greedy").annotators] == [("greedy_gpt4", 5, 0)]
    weighted = load_pool("weighted").annotators
    assert [load_prompt(m.prompt).format for m in weighted] == ["logprobs"]
    assert names("pools") == ("alpaca_farm", "ann", "eval", "greedy", "raters", "weighted")
    assert load_pool("ann").roles == ("gpt4", "chatgpt", "davinci003")


def test_a_pool_draws_as_it_says_or_as_the_pool_whose_members_it_shares_or_by_its_name(tmp_path):
    assert {name: load_pool(name).stream for name in names("pools")} == {
        "alpaca_farm": "sim_eval",
        "ann": "sim_eval",
        "eval": "sim_eval",
        "greedy": "sim_gpt4",
        "raters": "sim_eval",
        "weighted": "weighted",
    }
    base = {"name": "base", "annotators": [GOOD]}
    assert load_pool(_pool_file(tmp_path, base)).stream == "base"
    shared = _pool_file(tmp_path, {"name": "shared", "annotators_of": "./pool.yaml"}, "shared.yaml")
    own = _pool_file(tmp_path, {"name": "own", "draws": "mine", "annotators_of": "./pool.yaml"}, "own.yaml")
    assert (load_pool(shared).stream, load_pool(own).stream) == ("base", "mine")
    _pool_file(tmp_path, {**base, "draws": "told"})
    assert (load_pool(shared).stream, load_pool(own).stream) == ("told", "mine")
    assert PoolConfig(**load_pool(shared).model_dump(exclude={"annotators_of"})).stream == "told"


def test_the_docstrings_pool_works(tmp_path):
    shown = re.search(r"\n\n((?:    .*\n)+)", config.__doc__)[1]
    source = config._FOLDER / "prompts" / "gpt4_4.yaml"
    (tmp_path / "my_prompt.yaml").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    pool = load_pool(_pool_file(tmp_path, "".join(line[4:] + "\n" for line in shown.splitlines())))
    assert [member.name for member in pool.annotators] == ["careful", "quick", "odd"]
    assert (pool.flip, pool.annotators[2].temperature) == (0.25, 0.5)
    assert load_prompt(pool.annotators[2].prompt).digest == load_prompt("gpt4_4").digest


def test_a_pool_of_another_file_keeps_its_prompts_paths(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "mine.yaml").write_text((config._FOLDER / "prompts/chatgpt_4.yaml").read_text("utf-8"), encoding="utf-8")
    _pool_file(inner, {"name": "base", "annotators": [{**GOOD, "prompt": "./mine.yaml"}]})
    outer = load_pool(str(_pool_file(tmp_path, {"name": "noisy", "flip": 0.1, "annotators_of": "inner/pool.yaml"})))
    assert (outer.name, outer.flip, outer.annotators[0].prompt) == ("noisy", 0.1, str((inner / "mine.yaml").resolve()))


def test_all_mistakes_of_a_pool_are_listed_with_their_fields(tmp_path):
    wrong = [{"batch_sise": 5}, {"name": "b", "max_tokens": "20"}, {"name": "c", "role": None}]
    members = [GOOD | each for each in wrong]
    path = _pool_file(tmp_path, {"name": "mine", "flip": 0.7, "descripton": "x", "annotators": members})
    first, *lines = _error(load_pool, path).splitlines()
    assert first.startswith(f"{path}: 5 ")
    told = {
        "flip": "0.7",
        "descripton": "'description'",
        "annotators[0].batch_sise": "'batch_size'",
        "annotators[1].max_tokens": "'20'",
        "annotators[2].role": "None",
    }
    assert {
        field: told[field] in line for line in lines for field in [line.strip().partition(":")[0]]
    } == dict.fromkeys(told, True)


def test_all_wrong_prompts_of_a_pool_are_listed(tmp_path):
    (tmp_path / "p.yaml").write_text("name: p\nformat: label\nlayout: chat\nparts: [{user: x, itms: true}]", "utf-8")
    prompts = (
        {"prompt": "gtp4_3"},
        {"prompt": "gpt4_4", "batch_size": 5},
        {"prompt": "./no.yaml"},
        {"prompt": "./p.yaml"},
    )
    members = [GOOD | {"name": f"m{n}"} | each for n, each in enumerate(prompts)]
    message = _error(load_pool, _pool_file(tmp_path, {"name": "mine", "annotators": members}))
    for said in (
        r"annotators\[0\]\.prompt: .*'gtp4_3'.*'gpt4_3'",
        r"annotators\[1\]\.batch_size: .*'gpt4_4'",
        r"annotators\[2\]\.prompt: .*no\.yaml",
        r"parts\[0\]\.itms: .*'items'",
    ):
        assert re.search(said, message)


WRONG_VALUES = [None, True, [], {}, [1], {"a": 1}, "", "x\ny", -1, 0.5, float("nan"), float("inf"), 10**9, b"x", "é"]


FILES = {  # a good file of each kind, and which of the wrong values are right after all
    "pool": (
        load_pool,
        {"name": "p", "description": "", "flip": 0, "annotators_of": "eval", "draws": "d"},
        {"flip": "0.5", "draws": "None"},
    ),
    "annotator": (
        _load_annotator,
        GOOD | {"batch_size": 1, "temperature": 1, "top_p": 1},
        {"temperature": "0.5", "top_p": "0.5"},
    ),
    "prompt": (load_prompt, {"name": "p", "format": "label", "layout": "chat", "parts": [{"items": True}]}, {}),
    "models": (
        load_models,
        {"model": "m", "kind": "chat", "max_tokens_field": "max_tokens", "omit": ["n"], "extra_tokens": 1}
        | {"price_usd_per_million": [1, 2]},
        {"model": r"'x\ny' 'é'", "omit": "[]", "price_usd_per_million": "None"},
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_wrong_value_of_a_file_is_refused_by_its_field(tmp_path, kind):
    load, content, right = FILES[kind]
    load(_pool_file(tmp_path, content))
    for field in set(content) - {"description"}:
        for value in WRONG_VALUES:
            if repr(value) not in right.get(field, "").split():
                assert field in _error(load, _pool_file(tmp_path, {**content, field: value})), (field, value)
        if kind == "annotator" and field in GOOD:
            missing = {key: value for key, value in content.items() if key != field}
            assert f"annotators[1].{field}: missing." in _error(load, _pool_file(tmp_path, missing))


NO_POOL = {  # a part of what is said -> files
    "annotators_of": ["", "- a\n- b"],
    "expected YAML": [
        "name: [",
        "name: !!python/object/apply:os.system [id]",
        "name: 2024-99-99",
        *('"!'[n] * 60_000 for n in (0, 1)),
        *("[" * 5000, "{" * 5000, "? " * 30_000),
    ],
    "line 2, column 1.*'name'": ["name: mine\nname: yours\nannotators_of: eval"],
    r"\*name": ["name: &x mine\ndescription: *x\nannotators_of: eval"],
    "`annotators`": ["name: mine", "name: mine\nannotators: []"],
    "'eval'": ["name: mine\nannotators_of: evl"],
    "leads back": ["name: mine\nannotators_of: ./pool.yaml"],
    "flip: .*True": ["name: mine\nannotators_of: eval\nflip: yes"],
    "got 1": ["name: mine\n1: 2\nannotators_of: eval"],
    "mapping": ["- 1\n" * 16_000],
    "unknown field": ["? " + "x" * 60_000 + "\n: 1\nname: mine\nannotators_of: eval"],
    "65536 bytes": ["#" * (strict_yaml.MAX_BYTES + 1)],
    "quick": [f"name: mine\nannotators: [{json.dumps(GOOD)}, {json.dumps(GOOD)}]"],
}


@pytest.mark.parametrize("said", NO_POOL)
def test_files_that_are_no_pool(tmp_path, said):
    for content in NO_POOL[said]:
        path = _pool_file(tmp_path, content)
        message = _error(load_pool, path)
        assert re.search(said, message)
        assert str(path) in message
        assert len(message) < 2000


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "pool.yaml"
    path.write_bytes(b"name: \xff\xfe")
    assert "expected YAML" in _error(load_pool, path)
    assert "cannot be read (Is a directory)" in _error(load_pool, tmp_path)
    assert "Unknown name 'alpaca_frm' in pools. Did you mean 'alpaca_farm'?" in _error(load_pool, "alpaca_frm")


NO_PROMPT = {  # the same, of prompts that do not hold together
    "parts: ": [{"parts": []}],
    "format: .*'logprobs'.*'labels'": [{"format": "labels"}],
    "`items: true` .* 0 times": [{"parts": [{"user": "x"}]}],
    "`items: true` .* 2 times": [{"parts": [{"items": True}, {"items": True}]}],
    r"parts\[0\]\.items: .*False": [{"parts": [{"items": False}]}],
    r"parts\[0\]: ": [{"parts": [{"items": True, "user": "x"}]}, {"parts": [{}]}],
    "`user`": [{"parts": [{"items": True}, {"assistant": "x"}]}],
    "`system`": [{"parts": [{"user": "x"}, {"system": "y"}, {"items": True}]}],
    "one text": [{"layout": "completion", "parts": [{"system": "y"}, {"items": True}]}],
    r"parts\[0\]\.pairs\[0\]\.second": [{"parts": [{"pairs": [{"instruction": "i", "first": "x"}]}, {"items": True}]}],
    "one by one": [{"parts": [{"pairs": [_pair("x"), _pair("y")]}, {"items": True}]}],
    r"parts\[0\]\.user: ": [{"parts": [{"user": ""}, {"items": True}]}],
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


def test_models_by_role(tmp_path):
    spec = {"gpt4": "big", "chatgpt": {"model": "small", "price_usd_per_million": [1, 2.5], "omit": ["top_p"]}}
    for given in (spec, _pool_file(tmp_path, spec)):
        models = load_models(given, ("chatgpt", "gpt4"))
        assert models["gpt4"] == ModelConfig(model="big")
        assert (models["chatgpt"].price_usd_per_million, models["chatgpt"].omit) == ((1.0, 2.5), ("top_p",))


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
        ({"gpt4": "x", "chatgpt": "y"}, "davinci003: "),
        (by_role, "modl: .*'model'", "chatgpt: ", r"omit\[0\]: ", "kind: .*'chart'"),
        ({"model": "m", "price_usd_per_million": [1, -2]}, r"price_usd_per_million\[1\]: "),
        ("opnai", "'openai'"),
        (_pool_file(tmp_path, "[1, 2]"), "list"),
    ):
        message = _error(load_models, spec)
        assert all(re.search(each, message) for each in told)
