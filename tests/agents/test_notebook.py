"""The progress bars of `learn` and of a study in a real notebook."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # of other libraries'
ROOT = Path(__file__).resolve().parents[2]

CELLS = (
    "import sys; from alpacafarm_env.benchmarks.harness.runner import Progress, ProgressUpdate",
    """from alpacafarm_env import sandbox
from alpacafarm_env.agents import SFT, SFTConfig
demonstrations = sandbox.SANDBOX.demonstrations("sft")[:4]
_ = SFT(sandbox.POLICY, demonstrations, config=SFTConfig(batch_size=2, epochs=1)).learn()""",
    """progress = Progress({"one": 4, "other": 2})
progress.update(ProgressUpdate("one", 4, text="one is done"))
progress.update(ProgressUpdate("other", 2, state="score 0.5"))
progress.end()""",
)


@pytest.mark.parametrize("widgets", [True, False])
def test_bars_are_seen_in_a_notebook(widgets, monkeypatch, tmp_path):
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    without = "import sys; sys.modules['ipywidgets'] = None"
    cells = [nbformat.v4.new_code_cell(source) for source in ("" if widgets else without, *CELLS)]
    client = NotebookClient(nbformat.v4.new_notebook(cells=cells), resources={"metadata": {"path": str(ROOT)}})
    outputs = [output for cell in client.execute().cells for output in cell.outputs]
    streams = [output["text"] for output in outputs if output.output_type == "stream"]
    bars = [str(state.get("value")) for state in client.widget_state.values()] if widgets else streams
    for expected, texts in (("SFT: 100%", bars), ("2/2 [", bars), ("[100%,", bars), ("one is done", streams)):
        assert any(expected in " ".join(text.split()) for text in texts)  # a widget's spaces are not all alike
