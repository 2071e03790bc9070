"""Precision: what "auto" takes, for which models, and who decides it for all."""

import pytest
import torch
from torch import nn

from alpacafarm_env.agents import precision
from alpacafarm_env.agents.precision import Precision, race, resolve_precision


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> dict[Precision, float]:
    """Seconds that a race is to take, which a test fills in."""
    seconds: dict[Precision, float] = {}
    monkeypatch.setattr(precision, "race", lambda device: seconds)
    precision._raced.cache_clear()
    yield seconds  # type: ignore[misc]
    precision._raced.cache_clear()


def model(numbers: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(1000, numbers // 1000, bias=False, device="meta", dtype=dtype)


@pytest.mark.parametrize(("gain", "expected"), [(3.0, "bfloat16"), (1.2, "float32"), (0.3, "float32")])
def test_auto_takes_bfloat16_where_it_gains(raced, gain, expected, capsys) -> None:
    raced |= {"float32": gain, "bfloat16": 1.0}
    assert [resolve_precision("auto", model(10_000_000)) for _ in range(2)] == [expected] * 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("auto", model(9_000_000), "float32"),
        ("auto", model(10_000_000, torch.bfloat16), "bfloat16"),
        ("auto", model(10_000_000, torch.float16), "float32"),
        ("bfloat16", model(1000), "bfloat16"),
        ("float32", model(10_000_000, torch.bfloat16), "float32"),
    ],
)
def test_what_needs_no_race(raced, name, given, expected, capsys) -> None:
    assert resolve_precision(name, given) == expected
    assert capsys.readouterr().err == ""


def test_a_race_gives_seconds_and_resets_torch() -> None:
    seconds = race("cpu")
    assert min(seconds["float32"], seconds["bfloat16"]) > 0
    assert torch.get_float32_matmul_precision() == "highest"
