"""A policy with adapters, the real vLLM beside it, and what it answers."""

from contextlib import contextmanager

import pytest
import torch
from tests.models.batches import draw_second_factors
from tests.models.tiny import SPECIAL, WIDE, tiny_model

from lightrft.config import TrainConfig
from lightrft.engines import EngineConfig, GenerationRequest, SamplingParams, build_engine

RANK, ALPHA = 4, 12.0
PROMPTS = [GenerationRequest(tuple(range(start, start + 40)), start) for start in (3, 50)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def actor_at(folder, dtype=torch.float32, **options):
    from lightrft.models import LoraActor

    model = tiny_model(**WIDE, **SPECIAL).to(dtype)
    model.save_pretrained(folder)
    config = TrainConfig(**{"lora_rank": RANK, "lora_alpha": ALPHA, **options})
    actor = LoraActor(model, config).to(dtype)
    draw_second_factors(actor)
    return actor


def vllm_of(actor, folder, dtype="float32", *, is_merged=False):
    adapters = None if is_merged else actor.adapter_shape()
    # Of whole blocks alone there is a cache; on a CPU vLLM's own are longer than the canary.
    options = {"block_size": 32}
    return build_engine(
        EngineConfig("vllm", str(folder), dtype, adapters=adapters, options=options)
    )


@contextmanager
def plain_products():
    """Weights as a GPU has them: vLLM's copies for the CPU cannot be read back."""
    from vllm.model_executor.layers import utils

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain)
        yield


def answers(engine):
    return [(c.output_token_ids, c.output_logprobs) for c in engine.generate(PROMPTS, GREEDY)]


def require_equal_answers(first, second):
    for (ids, logprobs), (expected, wanted) in zip(first, second, strict=True):
        assert ids == expected
        assert logprobs == pytest.approx(wanted, abs=2e-4)


def old_base(engine, change=1e-3):
    """One base weight is not that of the checkpoint."""
    modules = engine.weights.modules
    modules["model.layers.0.mlp.down_proj"].weight.data[0, 0] += change
