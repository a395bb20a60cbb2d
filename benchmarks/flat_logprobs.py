"""Host seconds per token of vLLM's two forms of logprobs, side by side, without a model.

    python benchmarks/flat_logprobs.py

As in decoding, each round adds a token to every row; at the end the rows are read as our engine
reads them. The garbage collector runs as it does in a trainer, over the objects of all rows.
Processor time, the two forms in turn, medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from types import SimpleNamespace

import numpy as np
from vllm.logprobs import create_sample_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor

from lightrft.engines.rows import Job
from lightrft.engines.vllm.engine import raw_completions_of

ROWS, TOKENS, ROUNDS = 256, 512, 5


def seconds_per_token(*, is_flat: bool) -> float:
    """Return the processor time of all rows."""
    gc.collect()
    one = (np.array([[7]]), np.array([[-0.5]], dtype=np.float32), np.array([1]), None)
    begin = time.process_time()
    rows = [
        LogprobsProcessor(
            tokenizer=None,
            logprobs=create_sample_logprobs(is_flat),
            prompt_logprobs=None,
            cumulative_logprob=0.0,
            num_logprobs=0,
            num_prompt_logprobs=None,
        )
        for _ in range(ROWS)
    ]
    for _ in range(TOKENS):
        for row in rows:
            row._update_sample_logprobs(one)
    for row in rows:
        output = SimpleNamespace(
            index=0, token_ids=[7] * TOKENS, logprobs=row.logprobs, finish_reason="length"
        )
        raw_completions_of(Job((1,), TOKENS, 0), [output])
    return (time.process_time() - begin) / (ROWS * TOKENS)


if __name__ == "__main__":
    seconds_per_token(is_flat=True)
    times = [
        (seconds_per_token(is_flat=False), seconds_per_token(is_flat=True)) for _ in range(ROUNDS)
    ]
    plain, flat = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
    print(f"{plain:.2f} us a token as dictionaries, {flat:.2f} us flat ({plain / flat:.2f} x)")
