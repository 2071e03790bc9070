"""AdamW, with float32 masters of weights that are trained in bfloat16 or float16, and its state in a checkpoint.

bfloat16 has 8 significant bits: at a learning rate of 3e-6 an update of AdamW is smaller than half the distance between
a weight and its neighbour, and would be rounded away each time. The optimizer therefore moves float32 copies, of which
the weights are rounded copies (Micikevicius et al. 2018, arXiv:1710.03740, sec. 3.1), and has float32 moments.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ..bases import read_json
from ..errors import CheckpointError
from ..pretrained import reading
from .checkpoints import load_rows, save_rows, write_json
from .settings import TrainingConfig
from .sharding import from_rows, own_rows

NAME, MASTERS = "optimizer", "masters"
"""Their files in a checkpoint, without the ending."""


class Optimizer:
    """Moves a model's `parameters`.

    Attributes:
        parameters: By name, what AdamW moves: float32 parameters themselves, and the masters of the others.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainingConfig) -> None:
        low = {name: p for name, p in parameters.items() if torch.finfo(p.dtype).bits < 32}
        self._pairs = {name: (p, nn.Parameter(p.detach().float())) for name, p in low.items()}
        self._seen: dict[str, int] = {}
        self._note_versions()
        self.parameters = {name: self._pairs[name][1] if name in low else p for name, p in parameters.items()}
        self._adam = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.learning_rate,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True if next(iter(parameters.values())).device.type == "cuda" else None,  # one kernel, not a dozen
        )

    @property
    def has_moments(self) -> bool:
        """Whether a step has been made, or read."""
        return bool(self._adam.state)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._adam.zero_grad()

    def take_gradients(self) -> None:
        """Add the weights' gradients to those of their masters, after each backward pass."""
        for weight, master in self._pairs.values():
            if weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    def step(self, learning_rate: float) -> None:
        """One update; drops the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._read_changed_weights()
        self._adam.step()
        with torch.no_grad():
            for weight, master in self._pairs.values():
                weight.copy_(master)
        self._note_versions()
        self._adam.zero_grad()

    @torch.no_grad()
    def _read_changed_weights(self) -> None:
        """Take over weights that something else has changed, such as a folder that was read into the model."""
        for name, (weight, master) in self._pairs.items():
            if weight._version != self._seen[name]:  # counts changes in place: to compare the weights would take long
                master.copy_(weight)
        self._note_versions()

    def _note_versions(self) -> None:
        self._seen = {name: weight._version for name, (weight, _) in self._pairs.items()}

    def save(self, folder: Path, *, is_main: bool) -> None:
        """Write masters and moments into a checkpoint, as `save_rows` does; the main process their names too."""
        if self._pairs:
            save_rows(folder, MASTERS, {name: master for name, (_, master) in self._pairs.items()})
        state = {
            f"{name}:{moment}": value.detach()
            for name, parameter in self.parameters.items()
            for moment, value in self._adam.state[parameter].items()
        }
        save_rows(folder, NAME, state)
        if is_main:
            write_json(folder / f"{NAME}.json", self._identity())

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what `save` wrote, after the weights; these stand in for masters that a checkpoint of 0.1.0 lacks.

        Raises:
            CheckpointError: It is damaged or belongs to other parameters.
        """
        self._read_changed_weights()
        if read_json(folder / f"{NAME}.json") != self._identity():
            raise CheckpointError(
                f"The optimizer state of {folder} belongs to other parameters than this agent's model."
            )
        with reading(folder, "an optimizer's state"):
            for name, rows in load_rows(folder, MASTERS):
                master = self._pairs[name][1]
                master.copy_(from_rows(rows(own_rows(master)), master))
            # AdamW keeps its step counter on the CPU unless it is fused, its moments where the parameter is.
            for key, rows in load_rows(folder, NAME):
                name, moment = key.rsplit(":", 1)
                parameter = self.parameters[name]
                is_count = moment == "step"
                value = rows(slice(None)) if is_count else from_rows(rows(own_rows(parameter)), parameter)
                on_device = is_count and self._adam.defaults.get("fused")
                self._adam.state[parameter][moment] = value.to(parameter.device) if on_device else value

    def _identity(self) -> dict[str, object]:
        return {"name": type(self._adam).__name__, "parameters": list(self.parameters)}
