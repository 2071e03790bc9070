"""Processes that are gone, as another process sees it."""

import os
import subprocess
import sys

import pytest

from alpacafarm_env.llm.ledger.process import identity, is_gone

LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")  # noqa: PTH110
TELL = """
import sys
from alpacafarm_env.llm.ledger.process import identity
print(identity(), flush=True)
sys.stdin.read()
"""


def test_this_process_is_here():
    assert not is_gone(identity())


@LINUX
@pytest.mark.parametrize("waited", [True, False])
def test_a_killed_process_is_gone_waited_for_or_not(waited):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TELL], **pipes) as child:
        who = child.stdout.readline().strip()
        assert str(child.pid) in who
        assert not is_gone(who)
        child.kill()
        if waited:
            child.wait()
        else:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, still in the table
        assert is_gone(who)


@LINUX
def test_a_number_used_again_is_another_process():
    namespace, pid, start = identity().rsplit("/", 2)
    assert is_gone(f"{namespace}/{pid}/{int(start) - 1}")


@pytest.mark.parametrize("who", ["", "nonsense", "pid:[1]/1/1", "/1/1"])
def test_what_cannot_be_known_is_not_gone(who):
    assert not is_gone(who)
