"""Ragged storage: what is put in comes out, in any order and on any layout."""

import pytest
import torch

from alpacafarm_env.agents.rollouts import (
    Rollouts,
    length_mask,
    micro_batches,
    pad_rows,
    ragged,
    ragged_split,
    scoring_batch,
    segment_sum,
    unpad,
)

LENGTHS = torch.tensor([2, 0, 3, 1])
FLAT = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def rollouts() -> Rollouts:
    prompt_tokens, prompt_lengths = ragged([[10, 11], [20], [30, 31, 32], [40]])
    tokens, lengths = ragged([[1, 2], [], [3, 4, 5], [6]])
    return Rollouts(
        instructions=("a", "b", "c", "d"),
        texts=("A", "", "C", "D"),
        prompt_tokens=prompt_tokens,
        prompt_lengths=prompt_lengths,
        tokens=tokens,
        lengths=lengths,
        logprobs=-FLAT,
        finished=torch.tensor([True, False, True, False]),
    )


def rows_of(batch: Rollouts) -> list[tuple]:
    """Each row as plain Python, so that selections compare as lists."""
    parts = (
        ragged_split(batch.prompt_tokens, batch.prompt_lengths),
        ragged_split(batch.tokens, batch.lengths),
        ragged_split(batch.logprobs, batch.lengths),
    )
    columns = [[row.tolist() for row in part] for part in parts]
    return list(zip(batch.instructions, batch.texts, *columns, batch.finished.tolist(), strict=True))


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ([2, 0], [2, 0]),
        ([1, 1, 3], [1, 1, 3]),
        ([-1], [3]),
        (torch.tensor([True, False, False, True]), [0, 3]),
        (slice(1, 3), [1, 2]),
        ([], []),
    ],
)
def test_selection_takes_whole_rows(index, expected):
    rows = rows_of(rollouts())
    assert rows_of(rollouts()[index]) == [rows[i] for i in expected]


def test_selection_refuses_rows_that_are_not_there():
    with pytest.raises(IndexError):
        rollouts()[[4]]
    with pytest.raises(IndexError, match=r"mask must have shape \(4,\), got \(2,\)"):
        rollouts()[torch.tensor([True, False])]


def test_cat_is_the_inverse_of_cutting():
    batch = rollouts()
    assert rows_of(Rollouts.cat([batch[:1], batch[1:3], batch[3:]])) == rows_of(batch)
    with pytest.raises(ValueError, match="at least one part"):
        Rollouts.cat([])


def test_fields_of_different_lengths_are_refused():
    batch = rollouts()
    fields = {name: getattr(batch, name) for name in Rollouts.__dataclass_fields__}
    with pytest.raises(ValueError, match="number of rows"):
        Rollouts(**{**fields, "texts": ("A",)})
    with pytest.raises(ValueError, match="6 tokens but 2 log-probabilities"):
        Rollouts(**{**fields, "logprobs": FLAT[:2]})


def test_padding_and_back():
    padded = pad_rows(FLAT, LENGTHS, -1.0)
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [3, 4, 5], [6, -1, -1]]
    assert pad_rows(FLAT, LENGTHS, width=5).shape == (4, 5)
    assert torch.equal(unpad(padded, LENGTHS), FLAT)
    assert length_mask(LENGTHS).sum(1).tolist() == LENGTHS.tolist()


def test_segment_sum_and_its_gradient():
    flat = FLAT.clone().requires_grad_()
    sums = segment_sum(flat, LENGTHS)
    assert sums.tolist() == [3, 0, 12, 6]
    (sums * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    assert flat.grad.tolist() == [1, 1, 100, 100, 100, 1000]


def test_scoring_batch_by_hand():
    ids, predicts = scoring_batch(rollouts(), fill_token_id=9)
    assert ids.tolist() == [
        [10, 11, 1, 2, 9, 9],
        [20, 9, 9, 9, 9, 9],
        [30, 31, 32, 3, 4, 5],
        [40, 6, 9, 9, 9, 9],
    ]
    # A token is predicted at the position before it: the first one by the prompt's last token.
    assert predicts.nonzero().tolist() == [[0, 1], [0, 2], [2, 2], [2, 3], [2, 4], [3, 0]]


def test_micro_batches_hold_each_row_once_within_the_budget():
    lengths = torch.randint(1, 40, (97,), generator=torch.Generator().manual_seed(0))
    batches = micro_batches(lengths, 120)
    assert sorted(torch.cat(batches).tolist()) == list(range(97))
    assert all(len(batch) * lengths[batch].max() <= 120 for batch in batches)
    assert torch.cat([lengths[batch] for batch in batches]).tolist() == sorted(lengths.tolist(), reverse=True)
    # No batch would have held the next row too.
    assert all((len(batch) + 1) * lengths[batch].max() > 120 for batch in batches[:-1])
    assert micro_batches([], 8) == []


def test_micro_batches_name_a_row_that_fits_nowhere():
    with pytest.raises(ValueError, match=r"Row 1 has 9 tokens.*max_tokens=8"):
        micro_batches([3, 9, 5], 8)
