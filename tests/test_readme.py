"""README.md and docs/ say what is so: their code runs, and tables, commands and tree are those of the package."""

import importlib.util
import inspect
import re
from pathlib import Path

import gymnasium as gym
import pytest

import alpacafarm_env
from alpacafarm_env import agents
from alpacafarm_env.envs.registration import IDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = (*ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
DOCS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
INDEX = DOCS["docs/environments/index.md"]
ALL = "\n".join((README, *DOCS.values()))
BLOCKS = list(dict.fromkeys(re.findall(r"^```python\n(.*?)^```$", ALL, re.MULTILINE | re.DOTALL)))


def name_of(block):
    """The block's first line that is no import: what it is about."""
    return next(line for line in block.splitlines() if line and not line.startswith(("import ", "from ")))


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_python_block_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert "print(" not in block or "__main__" in block or capsys.readouterr().out.strip()


def test_a_study_of_ones_own_is_run(tmp_path, capsys):
    names = {"__name__": "readme"}
    exec(compile(next(block for block in BLOCKS if "StudyOptions" in block), "README.md", "exec"), names)
    options = names["AgreementOptions"](out=tmp_path, quick=True, seeds=2)
    assert names["run"](options) == 0
    rows = (tmp_path / "table.csv").read_text().splitlines()
    assert rows[0] == "seed,agreement"
    assert all(0.5 < float(row.split(",")[1]) <= 1 for row in rows[1:])
    assert "agreement" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["run", "test"])
def test_a_marked_block_is_one_line(name):
    """As .ci/run and others take them from here: a comment, then directly a fenced block of one line."""
    (found,) = re.findall(rf"^<!-- {name} -->\n```\w*\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert re.fullmatch("pip install .*", found)


def test_the_table_of_environments_is_the_registry():
    rows = re.findall(r"^\| `(AlpacaFarm-\w+-v0)` \| (\w+)", README, re.MULTILINE)
    assert tuple(name for name, _ in rows) == IDS
    assert {name: gym.spec(name).kwargs["split"] for name in IDS} == dict(rows)


@pytest.mark.parametrize("name", IDS)
def test_a_page_lists_the_info_and_the_arguments_of_its_environment(name):
    page = DOCS["docs/environments/" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.split("-")[1]).lower() + ".md"]

    def listed(section):
        parts = [re.search(rf"^## {section}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1] for text in (INDEX, page)]
        return re.findall(r"^\| `(\w+)` \|", "".join(parts), re.MULTILINE)

    env = gym.make(name)
    _, info = env.reset(seed=0)
    found, ended = set(info), False
    action = env.action_space.sample() if "Token" in name else "A rose is red."
    while not ended:
        *_, terminated, truncated, info = env.step(action)
        found, ended = found | set(info), terminated or truncated
    assert sorted(found) == sorted(listed("Info"))
    assert set(listed("Arguments")) == set(inspect.signature(type(env.unwrapped)).parameters)
    assert all(repr(env.spec.kwargs[key]).replace("'", '"') in page for key in ("split", "oracle"))


def test_the_page_of_annotators_lists_their_info(capsys):
    page, names = DOCS["docs/oracles/annotators.md"], {}
    exec(compile(next(block for block in BLOCKS if "JudgeServer" in block), "README.md", "exec"), names)
    sections = [re.search(r"^## Info\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1] for text in (INDEX, page)]
    listed = re.findall(r"^\| `(\w+)` \|", "".join(sections), re.MULTILINE)
    assert sorted(key for key in names["infos"] if not key.startswith("_")) == sorted(listed)


def test_every_command_exists():
    modules = set(re.findall(r"python -m ([\w.]+)", ALL))
    folder = ROOT / "benchmarks"
    studies = [*(each.parent.name for each in folder.glob("*/__main__.py"))]
    studies += [each.stem for each in folder.glob("[!_]*.py")]
    packages = {"alpacafarm_env", "alpacafarm_env.benchmarks"}
    assert modules == {*packages, *(f"alpacafarm_env.benchmarks.{name}" for name in studies)}
    for module in modules:
        assert importlib.util.find_spec(f"{module}.__main__" if module in packages else module), module


def test_the_tree_is_that_of_the_packages():
    page = DOCS["docs/explanation/architecture.md"]
    tree = re.search(r"^```\n(alpacafarm_env/.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    path, found = [], set()
    for line in tree.splitlines():
        indent, folder = re.match(r"( *)(\w+)/ ", line).groups()
        path = [*path[: len(indent) // 2], folder]
        found.add("/".join(path))
    folders = [ROOT / name for name in ("alpacafarm_env", "agents", "wrappers", "benchmarks")]  # no build/
    packages = {each.parent.relative_to(ROOT).as_posix() for top in folders for each in top.rglob("__init__.py")}
    studies = {each for each in packages if (ROOT / each / "__main__.py").exists() and each.startswith("benchmarks/")}
    assert found - {"tests"} == packages - studies


def test_every_link_to_a_file_leads_somewhere():
    for page, text in {"README.md": README, **DOCS}.items():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
            assert ((ROOT / page).parent / target).exists(), (page, target)


def test_a_version_is_the_same_everywhere():
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    newest, *_ = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited == alpacafarm_env.__version__
    assert newest in ("Unreleased", cited)


def test_every_file_that_pages_name_is_there():
    for page, text in DOCS.items():
        for name in re.findall(r"`((?:alpacafarm_env|agents|benchmarks|tests|\.ci)/[\w/.]+)`", text):
            assert (ROOT / name).exists(), (page, name)


def test_the_readme_is_one_screen():
    assert len(README.encode()) <= 6144


def test_every_agent_has_a_page():
    told = " ".join(text for page, text in DOCS.items() if page.startswith("docs/agents/"))
    configured = {name.removesuffix("Config") for name in agents.__all__ if name.endswith("Config")} & {*agents.__all__}
    for name in configured:
        assert re.search(rf"^::: alpacafarm_env\.agents\.{agents._MODULES[name]}\b", told, re.MULTILINE), name
