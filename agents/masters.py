"""float32 masters of weights that are trained in bfloat16 or float16.

bfloat16 has 8 significant bits: at a learning rate of 3e-6 an update of AdamW is smaller than half the distance between
a weight and its neighbour, and would be rounded away each time. The optimizer therefore moves float32 copies, of which
the weights are rounded copies (Micikevicius et al. 2018, arXiv:1710.03740, sec. 3.1), and has float32 moments.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from .checkpoints import load_rows, save_rows
from .sharding import from_rows, own_rows

NAME = "masters"
"""Of their files in a checkpoint, without the ending."""


class Masters:
    """What the optimizer moves in place of a model's `parameters`.

    Attributes:
        trained: By name, the float32 parameters themselves and the masters of the others.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        low = {name: p for name, p in parameters.items() if torch.finfo(p.dtype).bits < 32}
        self._pairs = {name: (p, nn.Parameter(p.detach().float())) for name, p in low.items()}
        self._seen: dict[str, int] = {}
        self._note()
        self.trained = {name: self._pairs[name][1] if name in low else p for name, p in parameters.items()}

    def take_gradients(self) -> None:
        """Add the weights' gradients to those of their masters, after each backward pass."""
        for weight, master in self._pairs.values():
            if weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                weight.grad = None

    @torch.no_grad()
    def follow(self) -> None:
        """Take over weights that something else has changed, such as a folder that was read into the model."""
        for name, (weight, master) in self._pairs.items():
            if weight._version != self._seen[name]:  # counts changes in place: to compare the weights would take long
                master.copy_(weight)
        self._note()

    @torch.no_grad()
    def lead(self) -> None:
        """Give the weights their masters' new values, rounded."""
        for weight, master in self._pairs.values():
            weight.copy_(master)
        self._note()

    def _note(self) -> None:
        self._seen = {name: weight._version for name, (weight, _) in self._pairs.items()}

    def save(self, folder: Path) -> None:
        """Write the masters into a checkpoint; nothing where there are none."""
        if self._pairs:
            save_rows(folder, NAME, {name: master for name, (_, master) in self._pairs.items()})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what `save` wrote, after the weights; they stand in for the masters that a checkpoint of 0.1.0 lacks."""
        self.follow()
        for name, rows in load_rows(folder, NAME):
            master = self._pairs[name][1]
            master.copy_(from_rows(rows(own_rows(master)), master))
