"""The memory of a PPO step as a process of its own measures it: `python peak_of_step.py OPTIONS`, in JSON.

Prints, by phase, the most bytes that the process has had in use less what it had before the models were made, and what
the formula says. malloc is told (MALLOC_MMAP_THRESHOLD_) to give back each tensor as it is freed: the resident size is
then that of the tensors, and of whatever buffers the kernels take.
"""

import gc
import json
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from alpacafarm_env.benchmarks import throughput
from alpacafarm_env.benchmarks.harness.machine import PeakMeter, clear_peak, peak_memory
from alpacafarm_env.benchmarks.methods.memory import Shape

CPU = torch.device("cpu")
TINY = {"hidden_size": 64, "num_layers": 1, "vocab_size": 64, "rollouts": 2, "prompt_tokens": 4, "response_tokens": 4}


def step(options):
    """Peaks of one step with two updates: moments are there from the first one's end on."""
    with tempfile.TemporaryDirectory() as folder:
        agent = throughput.make_agent(options, Path(folder), CPU)
        agent.config = replace(agent.config, minibatch_size=options.rollouts, num_epochs=2)
        meter, timed = PeakMeter(CPU), agent._loop.timed

        @contextmanager
        def both(part):
            with meter.measured(part), timed(part):
                yield

        agent._loop.timed = both
        updates = agent.updates()
        next(updates)
        updates.close()
        return meter.peaks, throughput.run_of(options, agent)


def main(given):
    disable_progress_bar()
    options = throughput.ThroughputOptions(**given)
    step(replace(options, **TINY))  # imports, thread pools and whatever else is made once
    gc.collect()
    clear_peak(CPU)
    before = peak_memory(CPU)
    peaks, run = step(options)
    shape = Shape.of(throughput.model_config(options))
    expected = throughput.expected_memory(shape, run)
    found = {name: [peak - before, expected[name]] for name, peak in peaks.items()}
    print(json.dumps({"parameters": shape.parameters, "phases": found}))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main(json.loads(sys.argv[1]))
