"""A judge of one's own, `--judge`, whose win rate against the data's references is measured next to everything else.

It is given as an oracle is: a name ("recorded", in the sandbox "human"), or a JSON object with the oracle's keywords:
{"pool": "eval", "base_url": ...}, {"judge": "sim_gpt4"}, {"human": file of labels}, {"reward_model": folder}; or
`module:Name`, an oracle or a judge. An oracle that gives a reward and no win rate prefers the response of higher reward
(0.5 for equal ones).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ... import sandbox
from ...data import Dataset
from ...data.recorded import RecordedParts
from ...errors import AlpacaFarmError, DataError
from ...folders import Content, hash_model
from ...llm.endpoint import Endpoint
from ...oracles import AnySpec, make_judge, make_oracle
from ...oracles.base import PreferenceOracle, RewardOracle
from ...oracles.judges import HigherReward, WinRate
from ...oracles.specs import is_own, only_compares, parts_of
from ...oracles.stored import Recorded, References
from ...plugins import source_hash

_UNDECIDING: Final = frozenset(
    ("ledger", "budget_usd", "replay", "api_key_env", "allow_insecure", "max_concurrency", "requests_per_minute")
) | {"attempt_timeout_s", "deadline_s"}
"""Keywords of a pool that decide no verdict, so they may change while a study goes on."""
LEARNED_GOLD: Final = "alpacafarm_env.benchmarks.surrogates.gold:LearnedGold"
_CONTENT: Final = {"reward_model": "a folder", "human": "a file", "policy": "a folder"}
"""Keywords whose content decides, whatever its name."""


def settled_judge(text: str | None, dataset: Dataset) -> str | None:
    """`--judge` with "recorded" as the learned gold, where a recorded folder is divided: new text was never judged."""
    return LEARNED_GOLD if text == "recorded" and isinstance(dataset, RecordedParts) else text


def make_own_judge(text: str, dataset: Dataset) -> RewardOracle:
    """The oracle of `--judge`: credits in [0, 1] against the references of eval.

    Raises:
        DataError: There is no such oracle, it cannot be made here, or eval has no references.
    """
    with _naming_option():
        dataset.references("eval")
        made = make_oracle(read_judge(text), dataset=dataset)
    if isinstance(made, WinRate | Recorded):
        return made
    return WinRate(HigherReward(made), References(dataset), name=f"higher score by {made.name}")


def make_own_comparer(text: str, dataset: Dataset, *, seed: int = 0) -> PreferenceOracle:
    """The judge of `--judge`, which compares any two responses; DataError if there is none, or it cannot be made."""
    with _naming_option():
        return make_judge(read_judge(text), dataset=dataset, seed=seed)


@contextmanager
def _naming_option() -> Iterator[None]:
    try:
        yield
    except (AlpacaFarmError, TypeError, ValueError) as error:
        raise DataError(f"--judge: {str(error).removeprefix('--judge: ')}") from error


def judge_name(text: str, dataset: Dataset) -> str:
    """The judge's name for readers."""
    return make_own_judge(text, dataset).name.removeprefix("win_rate:")


def read_judge(text: str) -> AnySpec:
    """The name or mapping that `--judge` holds; DataError if it begins like a JSON object and is none."""
    if not text.lstrip().startswith("{"):
        return {"judge": text} if is_own(text) and only_compares(text) else text
    try:
        spec: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise DataError(
            f"--judge: expected an oracle's name or a JSON object in single quotes, got {text!r} ({error})."
        ) from error
    return spec


def has_references(dataset: Dataset, split: str) -> bool:
    """Whether a split has references to beat."""
    try:
        return bool(dataset.references(split))
    except DataError:
        return False


def judge_settings(text: str | None) -> Any:
    """All that decides the verdicts of `--judge`, JSON-able, apart from files: see `judge_content`."""
    return None if text is None else _deciding(read_judge(text))


def judge_content(text: str) -> Content:
    """The content of the files behind `--judge`, also of an ensemble's members: weights, prompts, own source code."""
    contents = _contents(read_judge(text))
    if len(contents) == 1:
        return contents[0]
    return {f"{number}/{file}": mark for number, content in enumerate(contents) for file, mark in content.items()}


def refuse_trained_on(text: str, reward_model: Content) -> None:
    """DataError if the judge is, or has as a member, the reward model that training maximises."""
    if reward_model in _contents(read_judge(text)):
        raise DataError("--judge: expected a reward model held out, got that of --reward-model.")


def _deciding(spec: Any) -> Any:
    if isinstance(spec, list):
        return [_deciding(member) for member in spec]
    if not isinstance(spec, Mapping):
        return spec
    kept = dict(spec)
    if "pool" in spec:  # its files are content; a server that answers is known by its address alone
        kept["base_url"] = Endpoint(spec.get("base_url"), allow_insecure=True).base_url
        files = {"pool"} | ({"models"} if isinstance(spec.get("models"), str) else set())
        kept = {key: value for key, value in kept.items() if key not in _UNDECIDING | files}
    return {key: _CONTENT.get(key) or _deciding(value) for key, value in kept.items()}


def _contents(spec: Any) -> list[Content]:
    if spec == "surrogate":
        return [hash_model(sandbox.REWARD_MODEL)]
    if is_own(spec):
        return [{spec: source_hash(spec)}]
    if not isinstance(spec, Mapping):
        return []
    if "reward_model" in spec:
        return [hash_model(spec["reward_model"])]
    if spec.keys() == {"policy"}:
        return [hash_model(spec["policy"])]
    if "human" in spec:
        return [{"labels": f"sha256:{hashlib.sha256(Path(spec['human']).expanduser().read_bytes()).hexdigest()}"}]
    if "pool" in spec:
        from ...annotators.pool import content

        return [{"annotators": content(spec)}]
    return [content for part in parts_of(spec) for content in _contents(part)]
