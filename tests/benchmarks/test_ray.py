"""A study on a Ray cluster of two nodes of this machine: a node that dies loses no cell, and nothing is run twice."""

import threading
import time
from functools import partial

import pytest

from alpacafarm_env.benchmarks.harness.runner import Cell, run_cells
from alpacafarm_env.benchmarks.harness.study import Study, StudyOptions

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def measure(marks, number, doomed, on_progress):
    """A cell's work, which never ends on the doomed node."""
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "here"
    (marks / f"{number} on {node}").touch()
    if node == doomed:
        time.sleep(300)
    return [{"cell": number, "value": number / 3}]


def fail(on_progress):
    raise ZeroDivisionError("a reason")


def cells(marks, doomed=""):
    return [Cell(f"cell {number}", partial(measure, marks, number, doomed), weight=number + 1) for number in range(6)]


def table(out, made, address=None):
    """The table of a call, and which cells failed."""
    with Study(out, "demo", {}, ray=address) as study:
        path = study.write_table(run_cells(study, made))
        study.finish()
        return path.read_bytes(), study.failed


@pytest.fixture
def marks(tmp_path):
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_killed_node_changes_no_table(tmp_path, cluster, marks):
    (second,) = cluster.worker_nodes

    def kill():
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and not list(marks.glob(f"* on {second.node_id}")):
            time.sleep(0.1)
        cluster.remove_node(second, allow_graceful=False)

    alone = tmp_path / "alone"
    alone.mkdir()
    expected = table(tmp_path / "one", cells(alone))
    killer = threading.Thread(target=kill)
    killer.start()
    assert table(tmp_path / "two", cells(marks, second.node_id), cluster.address) == expected
    killer.join()
    (lost,) = marks.glob(f"* on {second.node_id}")
    tries = sorted(marks.iterdir())
    assert len(tries) == 7  # six cells, and the lost one again
    assert len([path for path in tries if path.name[0] == lost.name[0]]) == 2
    assert table(tmp_path / "two", cells(marks), cluster.address) == expected
    assert sorted(marks.iterdir()) == tries


def test_a_failing_task_is_reported_and_others_run(tmp_path, cluster, marks):
    rows, failed = table(tmp_path / "out", [Cell("bad", fail), *cells(marks)[:2]], cluster.address)
    assert failed == {"bad": "ZeroDivisionError: a reason"}
    assert len(rows.splitlines()) == 3


def test_two_addresses_are_refused():
    with pytest.raises(ValueError, match="--ray"):
        StudyOptions(ray=("a", "b"))
