"""The promised throughput: 95 % of what the server's latency lets 64 requests in flight reach, with a ledger."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import alpacafarm_env
from alpacafarm_env.annotators.config import AnnotatorConfig, PoolConfig
from alpacafarm_env.annotators.pool import AnnotatorPool
from alpacafarm_env.llm.client import ClientConfig

IN_FLIGHT, LATENCY_S, SECONDS = 64, 0.5, 34
COUNT = int(SECONDS * IN_FLIGHT / LATENCY_S)
ONE_BY_ONE = AnnotatorConfig(name="greedy_gpt4", role="gpt4", prompt="greedy_gpt4", max_tokens=250, temperature=0.0)
CONFIG = ClientConfig(max_concurrency=IN_FLIGHT)


@pytest.fixture
def url():
    """A judge server in a process of its own."""
    command = [sys.executable, "-m", "alpacafarm_env", "judge-server", "--anyway", "--latency", str(LATENCY_S)]
    root = Path(alpacafarm_env.__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as server:
        yield server.stdout.readline().strip()
        server.terminate()


def by_pool(url, folder):
    """When each answer of a pool came that asks one pair a request."""
    ends = []
    pool = AnnotatorPool(
        PoolConfig(name="single", annotators=(ONE_BY_ONE,)),
        "sandbox",
        base_url=url,
        ledger=folder / "pool.sqlite",
        client_config=CONFIG,
        on_progress=lambda _: ends.append(time.monotonic()),
    )
    pool.judge([f"Question {number}?" for number in range(COUNT)], ["one " * 60] * COUNT, ["two " * 60] * COUNT)
    return ends


@pytest.mark.slow
def test_64_in_flight_reach_95_percent_of_the_servers_rate(url, tmp_path, capsys):
    start = time.process_time()
    ends = sorted(by_pool(url, tmp_path))
    cpu_ms = 1000 * (time.process_time() - start) / COUNT
    first, last = ends[0] + 1, ends[-1] - 1  # the steady state
    share = sum(first <= end <= last for end in ends) / (last - first) * LATENCY_S / IN_FLIGHT
    with capsys.disabled():
        load = os.getloadavg()[0]
        print(f"\n{share:.1%} over {last - first:.0f} s, {cpu_ms:.2f} ms of CPU each, load {load:.1f}")
    assert last - first >= 30
    assert share >= 0.95
