"""Two small reward models in torch, trained from scratch on the recorded pairs: no encoder is downloaded.

Each scores an (instruction, response); the difference between response and reference, plus a line in the pair's length
and list features, is the log-odds of the verdict (Bradley and Terry). So what the networks add to the length-and-list
baseline is what they read. Words are hashed.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from ...seeding import keyed_rng
from .data import Array, Features, Indices

BUCKETS: Final = 2**13
LENGTHS: Final = {"bag": 256, "transformer": 80}
"""Words read of a response; of the instruction a quarter."""
EPOCHS: Final = {"bag": 4, "transformer": 3}
NUM_TRAINED: Final = {"bag": 20_000, "transformer": 8_000}
"""Training pairs of an epoch, drawn by weight: what a minute a fit allows."""
WIDTH: Final = 48
BATCH: Final = 64
LEARNING_RATE: Final = 2e-3


class Bag(nn.Module):
    """Mean word vectors of response and instruction, and their product, through one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BUCKETS, WIDTH, padding_idx=0)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(3 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def forward(self, asked: Tensor, response: Tensor) -> Tensor:
        """Scores [B] of responses [B, T] to instructions [B, S], both token ids with 0 for none."""
        x, y = (_mean(self.embed(tokens), tokens) for tokens in (asked, response))
        found: Tensor = self.head(torch.cat([x, y, x * y], dim=1)).squeeze(1)
        return found


class Transformer(nn.Module):
    """Two layers over instruction and response."""

    def __init__(self) -> None:
        super().__init__()
        length = LENGTHS["transformer"] + LENGTHS["transformer"] // 4
        self.embed = nn.Embedding(BUCKETS, WIDTH, padding_idx=0)
        self.place = nn.Parameter(torch.randn(length, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, asked: Tensor, response: Tensor) -> Tensor:
        """As `Bag.forward`."""
        tokens = torch.cat([asked, response], dim=1)
        # Without any word there would be no key to attend to: the first place is always open.
        hidden = (tokens == 0) & (torch.arange(tokens.shape[1]) > 0)
        states = self.layers(self.embed(tokens) + self.place, src_key_padding_mask=hidden)
        found: Tensor = self.head(_mean(states, tokens)).squeeze(1)
        return found


class Pairwise(nn.Module):
    """score(response) - score(reference), plus a line in the features of the pair."""

    def __init__(self, encoder: str) -> None:
        super().__init__()
        self.score = Bag() if encoder == "bag" else Transformer()
        self.line = nn.Linear(3, 1)

    def forward(self, asked: Tensor, response: Tensor, reference: Tensor, pair: Tensor) -> Tensor:
        """Log-odds [B] that the response is preferred."""
        both = self.score(torch.cat([asked, asked]), torch.cat([response, reference]))
        first, second = both.chunk(2)
        found: Tensor = first - second + self.line(pair).squeeze(1)
        return found


def train(encoder: str, features: Features, rows: Indices, labels: Array, weights: Array) -> Callable[[Indices], Array]:
    """Trains one network and returns its log-odds of rows of the features; the draws depend on the rows alone."""
    length = LENGTHS[encoder]
    asked, reference, response = (torch.from_numpy(tokens) for tokens in features.tokens(BUCKETS, length))
    line = torch.from_numpy(features.length_and_list).float()

    def batch(rows: Indices) -> tuple[Tensor, ...]:
        pair = torch.from_numpy(rows)
        place = pair % len(asked)
        return asked[place, : length // 4], response[pair], reference[place], line[pair]

    rng = keyed_rng(0, "recorded_surrogate", encoder, len(rows), int(rows[0]), int(rows[-1]))
    chance = weights / weights.sum()
    target = torch.from_numpy(labels).float()
    with torch.random.fork_rng():  # initial weights and dropout come from the global generator
        torch.manual_seed(int(rng.integers(2**62)))
        model = Pairwise(encoder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
        steps = EPOCHS[encoder] * -(-min(len(rows), NUM_TRAINED[encoder]) // BATCH)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for _ in range(steps):
            drawn = rng.choice(len(rows), size=BATCH, p=chance)
            loss = nn.functional.binary_cross_entropy_with_logits(model(*batch(rows[drawn])), target[drawn])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()

    @torch.inference_mode()
    def predict(rows: Indices) -> Array:
        found = [model(*batch(rows[i : i + 256])) for i in range(0, len(rows), 256)]
        return np.asarray(torch.cat(found).double().numpy())

    return predict


def _mean(states: Tensor, tokens: Tensor) -> Tensor:
    kept = (tokens != 0).unsqueeze(2)
    return (states * kept).sum(1) / kept.sum(1).clamp(min=1)
