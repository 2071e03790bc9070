"""Ragged storage: what is put in comes out, in any order and on any layout."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alpacafarm_env.agents.rollouts import (
    Rollouts,
    micro_batches,
    pad_rows,
    ragged,
    ragged_split,
    scoring_batch,
    segment_sum,
    unpad,
)

ids = st.lists(st.integers(10, 99), max_size=4)
batches = st.lists(st.tuples(ids.filter(len), ids, st.booleans()), min_size=1, max_size=6)
"""Prompt, response (which may be empty) and whether it finished."""
fast = settings(max_examples=50)


def make(rows: list[Any]) -> Rollouts:
    (prompt_tokens, prompt_lengths), (tokens, lengths) = (ragged([row[i] for row in rows]) for i in (0, 1))
    texts = tuple(map(str, range(len(rows))))
    finished = torch.tensor([row[2] for row in rows])
    logprobs = -torch.arange(1.0, len(tokens) + 1)
    return Rollouts(texts, texts, prompt_tokens, prompt_lengths, tokens, lengths, logprobs, finished)


def rows_of(batch: Rollouts) -> list[tuple[Any, ...]]:
    """Each row as plain Python, so that selections compare as lists."""
    flat = ((batch.prompt_tokens, batch.prompt_lengths), (batch.tokens, batch.lengths), (batch.logprobs, batch.lengths))
    columns = [[row.tolist() for row in ragged_split(*part)] for part in flat]
    return list(zip(batch.instructions, batch.texts, *columns, batch.finished.tolist(), strict=True))


@fast
@given(batches, st.data())
def test_selections_take_whole_rows_and_cat_joins_them(rows: list[Any], data: st.DataObject) -> None:
    batch, size = make(rows), len(rows)
    plain = rows_of(batch)
    assert [(prompt, tokens, done) for _, _, prompt, tokens, _, done in plain] == rows
    chosen = data.draw(st.lists(st.integers(-size, size - 1)))  # repeated, from the end, in any order, or none
    assert rows_of(batch[chosen]) == [plain[i] for i in chosen]
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    assert rows_of(batch[torch.tensor(mask)]) == [row for row, kept in zip(plain, mask, strict=True) if kept]
    cut = data.draw(st.integers(0, size))
    assert rows_of(Rollouts.cat([batch[:cut], batch[cut:]])) == plain


def test_what_does_not_fit_together_is_refused() -> None:
    batch = make([([1], [2, 3], True), ([4], [], False)])
    fields = {name: getattr(batch, name) for name in Rollouts.__dataclass_fields__}
    for changes, told in (({"texts": ("A",)}, r"\[1, 2\]"), ({"logprobs": torch.zeros(1)}, "2 tokens but 1")):
        with pytest.raises(ValueError, match=told):
            Rollouts(**{**fields, **changes})
    for index in ([2], torch.tensor([True])):
        with pytest.raises(IndexError):
            batch[index]
    with pytest.raises(ValueError, match="at least one part"):
        Rollouts.cat([])


@fast
@given(batches, st.integers(0, 3))
def test_padding_and_back_and_the_sum_of_each_row(rows: list[Any], extra: int) -> None:
    flat, lengths = ragged([tokens for _, tokens, _ in rows])
    width = max(map(len, (tokens for _, tokens, _ in rows))) + extra
    padded = pad_rows(flat, lengths, -1.0, width=width)
    assert padded.tolist() == [tokens + [-1] * (width - len(tokens)) for _, tokens, _ in rows]
    assert torch.equal(unpad(padded, lengths), flat)
    numbers = flat.float().requires_grad_()
    sums = segment_sum(numbers, lengths)
    assert sums.tolist() == [sum(tokens) for _, tokens, _ in rows]
    (sums * torch.arange(len(rows))).sum().backward()
    assert numbers.grad is not None
    assert numbers.grad.tolist() == [row for row, (_, tokens, _) in enumerate(rows) for _ in tokens]


@fast
@given(batches)
def test_a_scoring_batch_is_prompt_response_and_fill(rows: list[Any]) -> None:
    ids, predicts = scoring_batch(make(rows), fill_token_id=9)
    width = max(len(prompt) + len(tokens) for prompt, tokens, _ in rows)
    assert ids.tolist() == [[*prompt, *tokens, *[9] * width][:width] for prompt, tokens, _ in rows]
    # A token is predicted at the position before it: the first one by the prompt's last token.
    expected = [[row, len(p) - 1 + t] for row, (p, tokens, _) in enumerate(rows) for t in range(len(tokens))]
    assert predicts.nonzero().tolist() == expected


@fast
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 200))
def test_micro_batches_hold_each_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = [batch.tolist() for batch in micro_batches(lengths, budget)]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert [lengths[row] for batch in batches for row in batch] == sorted(lengths, reverse=True)
    assert all(len(batch) * lengths[batch[0]] <= budget for batch in batches)
    assert all((len(batch) + 1) * lengths[batch[0]] > budget for batch in batches[:-1])  # none could hold the next too


def test_a_row_beyond_the_budget_has_a_micro_batch_of_its_own() -> None:
    assert [batch.tolist() for batch in micro_batches([3, 9, 5], 8)] == [[1], [2], [0]]
