"""The real vLLM beside sharded trainers on two ranks: one engine a rank, and one over both."""

from importlib.util import find_spec

import pytest
import torch
from tests.models.tiny import WIDE, tiny_model
from tests.ranks import run_multiprocess

from lightrft.engines.types import EngineStatus, SamplingParams

BACKENDS = ("fsdp2", "zero3") if find_spec("deepspeed") is not None else ("fsdp2",)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, n=2, ignore_eos=True)


def make(backend, folder, tp_size):
    settings = {
        "actor_learning_rate": 1e-2,
        "lr_warmup_ratio": 0.0,
        "bf16": False,
        "engine_type": "vllm",
        "engine_tp_size": tp_size,
        "engine_args": {"block_size": 32},
        "pretrain": folder,
        "max_len": 100,
        "timeout_minutes": 2.0,
    }
    if backend == "fsdp2":
        from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

        return FSDPV2Strategy(1, 1.0, 1, 2, args=settings)
    from lightrft.strategy.deepspeed.strategy import DeepspeedStrategy

    return DeepspeedStrategy(1, 1.0, 1, 2, zero_stage=3, args=settings)


def train_a_step(strategy, ready, rank):
    tokens = torch.arange(12).view(1, 12) + 5 * rank
    with strategy.accumulation(1, ready.optimizer):
        loss = -ready.model(tokens, torch.ones_like(tokens)).logprobs.sum() / 22
        strategy.backward(loss, ready.model, ready.optimizer)
        result = strategy.optimizer_step(ready.optimizer, ready.model, ready.scheduler)
    assert result.grad_norm > 0


def actor_scores(ready, completion):
    """The trainer's logprobs of the sampled tokens; a collective."""
    tokens = torch.tensor([[*completion.prompt_token_ids, *completion.output_token_ids]])
    with torch.no_grad():
        logprobs = ready.model(tokens, torch.ones_like(tokens)).logprobs[0]
    return logprobs[len(completion.prompt_token_ids) :].tolist()


def compare(strategy, ready, rank):
    """Largest difference of a logprob over this rank's completions, and the completions."""
    # Unequal numbers of prompts; the later ones share their first 40 tokens.
    own = [[7 + (3 * i + j) % 90 for j in range(5 + i)] for i in range(1 + rank)]
    own.append([9 + j % 50 for j in range(40)] + [rank])
    greedy = strategy.gather_and_generate(GREEDY, own, sleep_engine=False)
    told = []
    sampled = strategy.gather_and_generate(
        SAMPLED, own, sleep_engine=False, on_finished=told.extend
    )
    # Of an engine that ranks share, each hears of its own completions alone.
    assert sorted(map(id, told)) == sorted(map(id, sampled))
    assert [list(c.prompt_token_ids) for c in greedy] == own
    assert len(sampled) == 2 * len(own)
    worst = 0.0
    # The trainer's forward is a collective: both ranks score every completion.
    for part in strategy.gather_objects([*greedy, *sampled]):
        for completion in part:
            scores = actor_scores(ready, completion)
            worst = max(
                worst,
                *(abs(a - b) for a, b in zip(scores, completion.output_logprobs, strict=True)),
            )
    return worst, [c.output_token_ids for c in greedy]


def run_strategy(strategy, engine, rank):
    from lightrft.models import Actor

    ready = strategy.prepare_models_and_optimizers(
        Actor(tiny_model(tie_word_embeddings=True, **WIDE)), None, None, None, None, 10
    )[0]
    if engine is None:
        engine = strategy.setup_inference_engine(None, "vllm", actor=ready.model)
        assert strategy.inference_engine_status is EngineStatus.SLEEPED
    else:
        strategy.inference_engine = engine
        strategy.update_engine_weights(ready.model)
    seen = []
    for _ in range(2):
        seen.append(compare(strategy, ready, rank))
        train_a_step(strategy, ready, rank)
        report = strategy.update_engine_weights(ready.model)
        assert report.num_verified_bytes > 0
        assert report.canary_difference < 1e-4
    seen.append(compare(strategy, ready, rank))
    hashes = strategy.gather_objects(report.engine_hash)
    assert len(set(hashes)) == 1
    # Detached, so that the strategy does not close it.
    strategy.inference_engine = None
    return engine, [difference for difference, _ in seen], [tokens for _, tokens in seen]


def program(rank, world_size, folder, tp_size):
    torch.distributed.init_process_group("gloo")
    engine, results = None, {}
    for backend in BACKENDS:
        with make(backend, folder, tp_size) as strategy:
            engine, differences, tokens = run_strategy(strategy, engine, rank)
            results[backend] = (differences, tokens, engine.weights_version)
    engine.close()
    # The trainer's process group outlives the engine.
    check = torch.ones(1)
    torch.distributed.all_reduce(check)
    return results, float(check)


@pytest.mark.vllm
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_engine_follows_sharded_trainers_on_two_ranks(tp_size, tmp_path):
    tiny_model(tie_word_embeddings=True, **WIDE).save_pretrained(tmp_path)
    # The first sync brings all weights: vLLM reads none.
    (tmp_path / "model.safetensors").unlink()
    ranks = run_multiprocess(program, 2, timeout_seconds=240, args=(str(tmp_path), tp_size))
    version = -1
    for backend in BACKENDS:
        version += 3
        for results, check in ranks:
            differences, tokens, last_version = results[backend]
            assert max(differences) < 1e-4
            assert last_version == version
            assert tokens[0] != tokens[1] != tokens[2]
            assert check == 2
