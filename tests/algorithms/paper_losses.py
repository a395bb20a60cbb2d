"""The objectives of the papers in float64 Python, one token at a time, aggregation included.

They import nothing of lightrft, so that a mistake in it cannot be copied here. `PAPER_LOSSES[name]`
takes a batch of numpy arrays and returns the loss of the whole optimizer batch:

    loss = PAPER_LOSSES["gspo"](new, old, advantages, mask, clip_low=3e-4, clip_high=4e-4)

with new, old, advantages, mask all [rows, tokens]; hyper-parameters default to the papers' (where
a paper leaves one open, to the value named beside it). Rows without tokens do not count.
"""

import math

import numpy as np

RESPONSE_BUDGET = 8
"""Default of the divisor of Dr.GRPO, `max_response_tokens`: the longest response of the run."""


def rows_of(*arrays):
    """One tuple of lists per row that has tokens: what stands inside the mask, the last array."""
    *values, mask = [np.asarray(array) for array in arrays]
    return [
        tuple([float(x) for x in value[i][mask[i].astype(bool)]] for value in values)
        for i in range(len(mask))
        if mask[i].any()
    ]


def _clip(value, low, high):
    return min(max(value, low), high)


def _mean(values):
    values = list(values)
    return sum(values) / len(values)


def _surrogate(p, q, a, clip_low, clip_high, dual_clip=None):
    r = math.exp(p - q)
    objective = min(r * a, _clip(r, 1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None and a < 0:
        objective = max(objective, dual_clip * a)
    return -objective


def ppo(new, old, advantages, mask, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    """GRPO, arXiv:2402.03300: 1/G sum_i 1/|o_i| sum_t of PPO's clipped surrogate."""
    return _mean(
        _mean(
            _surrogate(*token, clip_low, clip_high, dual_clip) for token in zip(*row, strict=True)
        )
        for row in rows_of(new, old, advantages, mask)
    )


def dapo(new, old, advantages, mask, *, clip_low=0.2, clip_high=0.28, dual_clip=None):
    """DAPO, arXiv:2503.14476: 1 / sum_i |o_i| sum_i sum_t."""
    return _mean(
        _surrogate(*token, clip_low, clip_high, dual_clip)
        for row in rows_of(new, old, advantages, mask)
        for token in zip(*row, strict=True)
    )


def dr_grpo(
    new,
    old,
    advantages,
    mask,
    *,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    max_response_tokens=RESPONSE_BUDGET,
):
    """Dr.GRPO, arXiv:2503.20783: the sum over a row divided by the generation budget."""
    return _mean(
        sum(_surrogate(*token, clip_low, clip_high, dual_clip) for token in zip(*row, strict=True))
        / max_response_tokens
        for row in rows_of(new, old, advantages, mask)
    )


def gspo(new, old, advantages, mask, *, clip_low=3e-4, clip_high=4e-4):
    """GSPO, arXiv:2507.18071: one clipped ratio a row; GSPO-token has an advantage per token."""
    total = []
    for p, q, a in rows_of(new, old, advantages, mask):
        s = math.exp(_mean(x - y for x, y in zip(p, q, strict=True)))
        clipped = _clip(s, 1 - clip_low, 1 + clip_high)
        total.append(-_mean(min(s * each, clipped * each) for each in a))
    return _mean(total)


def gmpo(new, old, advantages, mask, *, max_log_ratio=0.4, max_log_fall=None):
    """GMPO, arXiv:2507.20673, with token-level clipping to e^-0.4 and e^0.4."""
    total = []
    for p, q, a in rows_of(new, old, advantages, mask):
        logs = []
        for x, y, each in zip(p, q, a, strict=True):
            d = x - y
            if each > 0:
                d = min(d, max_log_ratio)
            elif each < 0:
                d = max(d, -(max_log_fall or max_log_ratio))
            logs.append(d)
        rho = math.exp(_mean(logs))
        total.append(-_mean(rho * each for each in a))
    return _mean(total)


def cpgd(
    new, old, advantages, mask, *, clip_low=0.2, clip_high=0.2, drift_coef=0.001, drift_cap=2.0
):
    """CPGD, arXiv:2505.12504: clipped log-probability plus the drift with its detached weight."""

    def token(p, q, a):
        bounded = (
            min(p, q + math.log(1 + clip_high)) if a > 0 else max(p, q + math.log(1 - clip_low))
        )
        return -bounded * a + drift_coef * min(math.exp(p - q) - 1, drift_cap) * p

    return _mean(
        _mean(token(*each) for each in zip(*row, strict=True))
        for row in rows_of(new, old, advantages, mask)
    )


def cispo(new, old, advantages, mask, *, clip_low=1.0, clip_high=0.28):
    """CISPO, MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5; clip_high is left open there."""
    return _mean(
        -_clip(math.exp(p - q), 1 - clip_low, 1 + clip_high) * a * p
        for row in rows_of(new, old, advantages, mask)
        for p, q, a in zip(*row, strict=True)
    )


def sapo(new, old, advantages, mask, *, temperature_positive=1.0, temperature_negative=1.05):
    """SAPO, arXiv:2511.20347: 1/G sum_i 1/|o_i| sum_t of the gate times the advantage."""

    taus = (temperature_positive, temperature_negative)
    return _mean(
        _mean(_gate(p - q, a, *taus) for p, q, a in zip(*row, strict=True))
        for row in rows_of(new, old, advantages, mask)
    )


def _gate(log_ratio, a, temperature_positive, temperature_negative):
    tau = temperature_positive if a > 0 else temperature_negative
    return -4 / tau / (1 + math.exp(-tau * (math.exp(log_ratio) - 1))) * a


def sapo_sequence(
    new, old, advantages, mask, *, temperature_positive=1.0, temperature_negative=1.05
):
    """The gate of SAPO on the ratio of GSPO."""
    taus = (temperature_positive, temperature_negative)
    return _mean(
        _mean(_gate(_mean(x - y for x, y in zip(p, q, strict=True)), each, *taus) for each in a)
        for p, q, a in rows_of(new, old, advantages, mask)
    )


def ppo_sequence(new, old, advantages, mask, *, clip_low=0.2, clip_high=0.2):
    """A response as one action, arXiv:2402.14740: PPO's surrogate of the product of ratios."""
    return _mean(
        _mean(_surrogate(sum(p), sum(q), each, clip_low, clip_high) for each in a)
        for p, q, a in rows_of(new, old, advantages, mask)
    )


def dro(new, old, advantages, mask, *, penalty=0.1):
    """DRO, arXiv:2405.19107, token by token: -A log p and half the squared log-ratio."""
    return _mean(
        -a * p + penalty / 2 * (p - q) ** 2
        for row in rows_of(new, old, advantages, mask)
        for p, q, a in zip(*row, strict=True)
    )


def reinforce(new, old, advantages, mask):
    """Williams 1992 over all tokens of the batch: -A log p."""
    return _mean(
        -a * p for row in rows_of(new, old, advantages, mask) for p, _, a in zip(*row, strict=True)
    )


def _covariances(tokens):
    mean_p, mean_a = _mean(p for p, _, _ in tokens), _mean(a for _, _, a in tokens)
    return [(p - mean_p) * (a - mean_a) for p, _, a in tokens]


def clip_cov(
    new,
    old,
    advantages,
    mask,
    *,
    clip_low=1.0,
    clip_high=1.0,
    cov_ratio=2e-4,
    cov_low=1.0,
    cov_high=5.0,
):
    """Clip-Cov, arXiv:2505.22617: systematic in place of random selection."""
    rows = rows_of(new, old, advantages, mask)
    tokens = [token for row in rows for token in zip(*row, strict=True)]
    candidates = []
    for index, (covariance, (p, q, a)) in enumerate(zip(_covariances(tokens), tokens, strict=True)):
        r = math.exp(p - q)
        is_clipped = (a > 0 and r > 1 + clip_high) or (a < 0 and r < 1 - clip_low)
        if cov_low < covariance < cov_high and not is_clipped:
            candidates.append(index)
    wanted = 0 if cov_ratio == 0 else max(1, math.floor(cov_ratio * len(tokens) + 1e-9))
    count = min(wanted, len(candidates))
    left_out = {candidates[math.floor((k + 0.5) * len(candidates) / count)] for k in range(count)}
    losses = [_surrogate(*token, clip_low, clip_high) for token in tokens]
    return sum(x for i, x in enumerate(losses) if i not in left_out) / len(tokens)


def kl_cov(new, old, advantages, mask, *, cov_ratio=2e-3, kl_coef=1.0):
    """KL-Cov, arXiv:2505.22617: |log ratio| on the tokens of largest covariance."""
    rows = rows_of(new, old, advantages, mask)
    tokens = [token for row in rows for token in zip(*row, strict=True)]
    order = sorted(range(len(tokens)), key=lambda i: -_covariances(tokens)[i])
    wanted = 0 if cov_ratio == 0 else max(1, math.floor(cov_ratio * len(tokens) + 1e-9))
    held = set(order[:wanted])
    return _mean(
        -math.exp(p - q) * a + (kl_coef * abs(p - q) if i in held else 0.0)
        for i, (p, q, a) in enumerate(tokens)
    )


PAPER_LOSSES = {
    "ppo": ppo,
    "clipped": ppo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "gspo-token": gspo,
    "gmpo": gmpo,
    "cpgd": cpgd,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "dro": dro,
    "ppo-sequence": ppo_sequence,
    "sapo-sequence": sapo_sequence,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
