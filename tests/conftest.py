"""Shared by all tests: no network, and a small data set and oracles that need nothing but numpy."""

import os
import re
import signal
import socket
from collections.abc import Callable, Sequence

# For tiny models a second torch thread gains nothing. Read when torch and its subprocesses start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No network in subprocesses either, and no five tries at it. Read when huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
from hypothesis import settings

from alpacafarm_env.errors import did_you_mean
from alpacafarm_env.instructions import Demonstration, Instruction, Preference
from alpacafarm_env.oracles.base import Constant

# A shell without job control ignores SIGINT in what it puts in the background, and subprocesses inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The same examples in every run.
settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")


def pytest_configure(config):
    """`--dist loadfile` keeps the order of the files, instead of sorting them by their number of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Long files first: one of them at the end would leave the other processes idle."""
    items.sort(key=lambda item: item.path.name not in ("test_claims.py", "test_readme.py"))


def pytest_runtest_setup(item):
    if item.get_closest_marker("data") and "ALPACAFARM_DATA" not in os.environ:
        pytest.skip("set ALPACAFARM_DATA to the folder of recorded judgements")


def _refuse_remote(host: object) -> None:
    """RuntimeError unless the host is this machine."""
    name = host.decode() if isinstance(host, bytes) else str(host or "localhost")
    if name != "localhost" and not re.fullmatch(r"127(\.\d+){3}|::1", name):
        raise RuntimeError(f"Tests must not use the network, but this one connects to {name!r}.")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """A test that would reach beyond this machine fails; servers on the loopback interface and pipes are fine."""
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse_remote(address[0])
        return connect(self, address)

    def guarded_getaddrinfo(host, *args, **kwargs):
        _refuse_remote(host)
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)


class TinyDataset:
    """Twelve instructions a split, a third of them with an input, some beyond ASCII; ids start at 100."""

    name = "tiny"
    level = "recorded"
    splits = ("sft", "preference", "unlabeled", "val", "eval")

    def __init__(self) -> None:
        self._instructions = {
            split: tuple(
                Instruction(
                    f"Say {split} number {i} “now” 日本 🙂." if i % 2 else f"Say {split} number {i}.",
                    f"line {i}" if i % 3 == 0 else "",
                    id=100 + i,
                    split=split,
                    source="koala" if split == "eval" else "",
                )
                for i in range(12)
            )
            for split in self.splits
        }

    def instructions(self, split: str) -> tuple[Instruction, ...]:
        if split not in self._instructions:
            raise did_you_mean("split", split, self.splits)
        return self._instructions[split]

    def references(self, split: str) -> tuple[str, ...]:
        return tuple(f"Reference for {i.id}." for i in self.instructions(split))

    def demonstrations(self, split: str = "sft") -> tuple[Demonstration, ...]:
        return tuple(Demonstration(i, f"Demonstration for {i.id}.") for i in self.instructions(split))

    def preferences(self, split: str = "preference") -> tuple[Preference, ...]:
        return tuple(
            Preference(i, (f"First for {i.id}.", f"Second for {i.id}, longer."), 1 + i.id % 2)
            for i in self.instructions(split)
        )


class CountingOracle:
    """A deterministic score of the text, remembering the size of each batch it was asked about."""

    def __init__(self, name: str = "counting", scale: float = 1.0) -> None:
        self.name = name
        self.scale = scale
        self.calls: list[int] = []

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> np.ndarray:
        self.calls.append(len(responses))
        pairs = zip(instructions, responses, strict=True)
        return self.scale * np.array([len(response) / 8 - len(instruction) / 64 for instruction, response in pairs])

    def __deepcopy__(self, memo: object) -> "CountingOracle":
        return self


@pytest.fixture
def tiny_dataset() -> TinyDataset:
    return TinyDataset()


@pytest.fixture
def constant_oracle() -> Constant:
    return Constant(0.5)


@pytest.fixture
def counting_oracle() -> CountingOracle:
    return CountingOracle()


@pytest.fixture
def make_counting_oracle() -> Callable[..., CountingOracle]:
    return CountingOracle
