"""Rows of products as the trainer has them, against the kernels compiled for them."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightrft.kernels.logprob.policy_loss import plan_loss, up_to_multiple
from lightrft.kernels.logprob.product_engine import ProductEngine

# (vocabulary, hidden) of 0.5B, 7B, 72B, a wider vocabulary than theirs, and a small one.
SHAPES = ((151_936, 896), (152_064, 3584), (152_064, 8192), (262_144, 5376), (32_000, 4096))


def launched_rows(num_tokens, hidden, weight):
    """Rows of the products of every chunk, zeros included."""
    most, _ = plan_loss(num_tokens, hidden, weight)
    counts = [min(most, num_tokens - first) for first in range(0, num_tokens, most)]
    assert sum(counts) == num_tokens
    return [up_to_multiple(count, ProductEngine.row_multiple) for count in counts]


@pytest.mark.parametrize("vocab, size", SHAPES)
def test_b1_every_number_of_tokens_is_multiplied_in_rows_that_the_table_has(vocab, size):
    with FakeTensorMode():
        hidden = torch.empty(1, size, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(vocab, size, dtype=torch.bfloat16, device="cuda")
    seen = set()
    for num_tokens in [*range(1, 4097), 8191, 8192, 8193, 32_767]:
        rows = launched_rows(num_tokens, hidden, weight)
        # All but the last are whole tiles, and at most 15 rows are zeros.
        assert not any(count % 128 for count in rows[:-1])
        assert sum(rows) - num_tokens < 16
        # They fit the budget, or are as few as products are fast with.
        assert max(rows) * vocab * 4 <= 2**31 or max(rows) <= 1024
        seen |= {(r % 16 == 0, r % 8 == 0) for r in rows}
    assert seen == {(True, True)}
