"""A taskset for verifiers: an instruction is a task of one turn. Source: verifiers 0.4, `verifiers.v1`."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

from ..data.load import load_dataset
from . import scorer


class OracleConfig(vf.TaskConfig):
    """Who rewards: an oracle's name, for a data set."""

    oracle: str = "surrogate"
    dataset: str = "sandbox"
    seed: int = 0


class AlpacaFarmConfig(vf.TasksetConfig):
    """Which instructions are asked."""

    split: str = "unlabeled"
    task: OracleConfig = OracleConfig()


class AlpacaFarmTask(vf.Task[vf.TaskData, vf.State, OracleConfig]):  # noqa: D101
    @vf.reward
    async def alpacafarm(self, trace: vf.Trace) -> float:
        """The oracle's score of the last answer; those who wait together are one call."""
        score = scorer(oracle=self.config.oracle, dataset=self.config.dataset, seed=self.config.seed)
        answer = (trace.assistant_messages[-1].content or "") if trace.assistant_messages else ""
        return (await asyncio.to_thread(score, [str(self.data.prompt)], [answer]))[0]


class AlpacaFarmTaskset(vf.Taskset[AlpacaFarmTask, AlpacaFarmConfig]):  # noqa: D101
    def load(self) -> Iterator[AlpacaFarmTask]:
        """A task for each instruction of the split."""
        for each in load_dataset(self.config.task.dataset).instructions(self.config.split):
            yield AlpacaFarmTask(vf.TaskData(id=str(each.id), prompt=str(each)), self.config.task)
