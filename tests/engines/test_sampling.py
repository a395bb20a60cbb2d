import math

import pytest
import torch

from lightrft.engines.sampling import (
    draw_tokens,
    invert_cumulative,
    row_keys,
    sampling_logprobs,
    uniforms,
)
from lightrft.engines.types import SamplingParams


def slow_law(logits, params):
    """The law in float64, token by token, from its definition."""
    temperature = params.temperature or 1.0
    weights = [math.exp(x / temperature - max(logits) / temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature > 0:
        if params.top_k != -1:
            ranked = ranked[: params.top_k]
        if params.top_p < 1:
            mass, total, kept = 0.0, sum(weights[i] for i in ranked), []
            for i in ranked:
                if kept and mass >= params.top_p * total:
                    break
                kept.append(i)
                mass += weights[i]
            ranked = kept
        if params.min_p > 0:
            ranked = [i for i in ranked if weights[i] >= params.min_p * weights[ranked[0]]]
    total = sum(weights[i] for i in ranked)
    return [math.log(weights[i] / total) if i in ranked else -math.inf for i in range(len(logits))]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, top_k=3),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=5),
        SamplingParams(top_k=500),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.05),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.8, min_p=0.1),
    ],
)
def test_the_law_is_that_of_the_definition(params):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(7, 61, generator=generator)
    law = sampling_logprobs(logits, params)
    expected = torch.tensor([slow_law(row, params) for row in logits.double().tolist()])
    assert torch.equal(law.isinf(), expected.isinf())
    kept = ~expected.isinf()
    torch.testing.assert_close(law[kept], expected[kept].float(), rtol=0, atol=2e-6)
    if params.truncates and params.top_k != 500:
        assert not kept.all()


def test_the_law_is_float32_for_half_precision_logits():
    logits = torch.randn(2, 9).bfloat16()
    law = sampling_logprobs(logits, SamplingParams())
    assert law.dtype == torch.float32
    assert torch.equal(law, logits.float().log_softmax(-1))


def test_equal_logits_are_kept_from_the_lowest_id_on():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 1.0]])
    kept_by_k = sampling_logprobs(logits, SamplingParams(top_k=4)).isfinite()
    assert kept_by_k.tolist() == [[True, True, True, True, False, False]]
    kept_by_p = sampling_logprobs(torch.zeros(1, 10), SamplingParams(top_p=0.35)).isfinite()
    assert kept_by_p.sum().item() == 4
    assert kept_by_p[0, :4].all()
    greedy, _ = draw_tokens(logits, torch.zeros(1).double(), SamplingParams(temperature=0))
    assert greedy.tolist() == [1]


def test_a_draw_inverts_the_cumulative_distribution():
    probabilities = torch.tensor([[0.5, 0.0, 0.25, 0.25]])
    logprobs = probabilities.log()
    steps = {0.0: 0, 0.4999: 0, 0.5: 2, 0.7499: 2, 0.75: 3, 1 - 2.0**-52: 3}
    for number, token in steps.items():
        drawn = invert_cumulative(logprobs, torch.tensor([number], dtype=torch.float64))
        assert drawn.tolist() == [[token]]


def test_an_impossible_token_is_never_drawn_at_either_end():
    logprobs = torch.tensor([[-math.inf, 0.3, -math.inf, 0.7, -math.inf]]).log_softmax(-1)
    numbers = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    drawn = invert_cumulative(logprobs.repeat(2, 1), numbers)
    assert drawn.flatten().tolist() == [1, 3]


def test_draws_follow_the_law():
    params = SamplingParams(temperature=0.8, top_k=6)
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    keys = row_keys(0, range(20000), [0] * 20000, device=torch.device("cpu"))
    tokens, logprobs = draw_tokens(logits.repeat(20000, 1), uniforms(keys, 0, 1)[0], params)
    law = sampling_logprobs(logits, params)[0].exp()
    shares = tokens.bincount(minlength=12) / 20000
    # Five standard deviations of a share.
    assert (shares - law).abs().max() < 5 * (0.25 / 20000) ** 0.5
    assert shares[law == 0].sum() == 0
    torch.testing.assert_close(logprobs, law.log()[tokens])
