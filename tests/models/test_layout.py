"""Token t is scored from the hidden state of token t - 1, wherever the padding is."""

import pytest
import torch
from tests.host_waits import HostWaits

from lightrft.models import TokenLayout

TOKENS = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)


def test_all_tokens_with_a_predecessor_are_scored_by_default():
    layout = TokenLayout.padded(TOKENS, MASK)
    assert layout.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert layout.is_right_padded
    assert layout.rows.tolist() == [0, 0, 1]
    assert layout.columns.tolist() == [1, 2, 1]
    assert layout.targets.tolist() == [6, 7, 9]


def test_left_padding_starts_at_position_zero_and_skips_the_first_token():
    tokens = torch.tensor([[0, 0, 5, 6, 7]])
    layout = TokenLayout.padded(tokens, tokens > 0)
    assert layout.position_ids.tolist() == [[0, 0, 0, 1, 2]]
    assert layout.targets.tolist() == [6, 7]


def test_select_takes_the_previous_hidden_state_and_scatter_puts_it_back():
    scored = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0]], dtype=torch.bool)
    layout = TokenLayout.padded(TOKENS, MASK, scored)
    hidden = torch.arange(8.0).view(2, 4, 1)
    selected = layout.select(hidden)
    assert selected.squeeze(1).tolist() == [1.0, 4.0]
    assert layout.scatter(selected.squeeze(1)).tolist() == [[0, 0, 1, 0], [0, 4, 0, 0]]


@pytest.mark.parametrize(
    "row, column", [pytest.param(0, 0, id="first token"), pytest.param(1, 2, id="padding")]
)
def test_scoring_a_first_token_or_padding_is_refused(row, column):
    scored = torch.zeros_like(MASK)
    scored[row, column] = True
    with pytest.raises(ValueError, match=f"row {row}, position {column}"):
        TokenLayout.padded(TOKENS, MASK, scored)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"attention_mask .* got \(2, 3\) and \(2, 4\)"):
        TokenLayout.padded(TOKENS, MASK[:, :3])
    with pytest.raises(ValueError, match="scored_mask"):
        TokenLayout.padded(TOKENS, MASK, MASK[:1])


@pytest.mark.parametrize("make", [TokenLayout.padded, TokenLayout.packed])
@pytest.mark.parametrize("scored", [None, torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]])])
def test_a_layout_waits_for_the_device_once(make, scored):
    with HostWaits() as watch:
        layout = make(TOKENS, MASK, scored)
    assert watch.names == ["tolist"]
    assert layout.targets.tolist() == [6, 7, 9]
