"""A decode step on tensors that stay where they are: a GPU is told once how to make it, and then to make it again.

A step of 32 layers is more than a thousand kernels, which take Python longer to launch than a GPU to run. A CUDA graph
launches them all at once, but always on the same memory and in the same shapes. So the buffers of keys and values are
attended to as a whole, with the slots not yet written hidden by a mask, and which slot is next is a tensor.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from .kv_cache import PreallocatedCache

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Token ids [n, 1], positions [n, 1] and additive mask [n, 1, 1, width] -> logits [n, V]."""
AGREEMENT = 0.05
"""How far, relative and absolute, a graph's first logits may be from those of the step it was taken from: in bfloat16,
whose digits are this coarse, another kernel may be chosen for a product."""


class StaticStep:
    """Reads one token a row, for the same rows each time. On a CUDA device it becomes a graph in its first call.

    Args:
        forward: Writes into the cache at its slot.
        mask: Additive [n, 1, 1, width]; hides the left pads.
    """

    def __init__(self, forward: Forward, cache: PreallocatedCache, mask: Tensor) -> None:
        self._forward, self._cache, self._mask = forward, cache, mask
        written = cache.get_seq_length()
        self._mask[..., written:] = torch.finfo(mask.dtype).min
        self._slot = torch.tensor([written], device=mask.device)
        self._token = torch.zeros(len(mask), 1, dtype=torch.int64, device=mask.device)
        self._position = torch.zeros_like(self._token)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._to_capture = makes_graphs(mask.device)
        cache.write_at(self._slot)

    def __call__(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits [n, V] after `token` [n] at `position` [n, 1]; overwritten by the next call."""
        self._token.copy_(token[:, None])
        self._position.copy_(position)
        if self._to_capture:
            self._to_capture = False
            self._capture()
        if self._graph is None:
            self._logits = self._step()
        else:
            self._graph.replay()
        self._cache.advance()
        return self._logits

    def _step(self) -> Tensor:
        self._mask.index_fill_(-1, self._slot, 0)
        logits = self._forward(self._token, self._position, self._mask)
        self._slot += 1
        return logits

    def _capture(self) -> None:
        """Make the graph, and check it against the step itself. What a step changes is put back: which slot is next."""
        try:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries allocate their workspaces in the first passes
                for _ in range(2):
                    expected = self._step()
                    self._slot -= 1
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._logits = self._step()
            graph.replay()
            self._slot -= 1
            torch.testing.assert_close(self._logits, expected, rtol=AGREEMENT, atol=AGREEMENT)
        except (RuntimeError, AssertionError) as error:
            warnings.warn(f"Sampling goes on without a CUDA graph, and slower: {error}", stacklevel=2)
        else:
            self._graph = graph


def makes_graphs(device: torch.device) -> bool:
    """Whether a device can be told a sequence of kernels once."""
    return device.type == "cuda"
