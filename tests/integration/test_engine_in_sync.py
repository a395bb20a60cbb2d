"""The engine samples from the trained weights, and its logprobs are those of the trainer."""

from argparse import Namespace

import pytest
import torch
from tests.models.tiny import SPECIAL, WIDE, tiny_model
from tests.ranks import run_multiprocess
from tests.runs import TextReward

from lightrft.datasets.types import Prompt
from lightrft.engines.types import GenerationRequest, SamplingParams
from lightrft.models import Actor
from lightrft.strategy import get_fake_strategy, get_strategy
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

NUM_STEPS = 3
NUM_PROMPTS, GROUP_SIZE, VOCAB = 4, 4, 97
PROMPTS = [tuple(5 + (7 * i + j) % 90 for j in range(3 + 2 * i)) for i in range(NUM_PROMPTS)]
MARGIN = 1e-4  # two candidates closer than this may swap by rounding


def low_tokens(text):
    """Reward small token ids, which the tokenizer below shows as characters."""
    return sum(ord(c) < 80 for c in text) / max(1, len(text))


class CharacterTokenizer:
    pad_token_id = 0

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(32 + int(t)) for t in token_ids)

    def batch_decode(self, rows, skip_special_tokens=True):
        return [self.decode(row) for row in rows]


def trainer_on(backend, actor, reward):
    """Return a trainer of two optimizer steps a rollout, with the embedded engine."""
    args = Namespace(
        fsdp=backend == "fsdp",
        zero_stage=int(backend[-1]) if backend.startswith("zero") else 2,
        seed=3,
        bf16=False,
        micro_train_batch_size=2,
        train_batch_size=8,
        micro_rollout_batch_size=4,
        rollout_batch_size=NUM_PROMPTS,
        n_samples_per_prompt=GROUP_SIZE,
        generate_max_len=12,
        actor_learning_rate=3e-4,
        lr_warmup_ratio=0.0,
        lr_scheduler="constant",
        init_kl_coef=0.0,
        loss_agg_mode="token-mean",
        engine_type="hf",
        pretrain=None,
    )
    strategy = get_fake_strategy(args) if backend == "fake" else get_strategy(args)
    ready = strategy.prepare_models_and_optimizers(actor, None, None, None, args, 100)[0]
    strategy.setup_inference_engine(args, engine_type="hf", actor=ready)
    return SPMDPPOTrainer(strategy, ready, None, reward, tokenizer=CharacterTokenizer(), loggers=[])


def wide_actor(*, tied):
    shape = {**WIDE, "intermediate_size": 160, "tie_word_embeddings": tied}
    return Actor(tiny_model(vocab_size=VOCAB, **shape, **SPECIAL))


def train(rank, world_size, backend, tied, folder):
    """Per step: sampled tokens by (request, sample), logprob difference, greedy differences."""
    trainer = trainer_on(backend, wide_actor(tied=tied), TextReward(low_tokens))
    strategy = trainer.strategy
    rows = [Prompt(i, f"p{i}", ids) for i, ids in enumerate(PROMPTS)]
    steps = []
    for step in range(NUM_STEPS):
        batch = trainer.make_experience(rows[rank::world_size]).rollouts
        samples = {
            int(sample): ids[mask].tolist()
            for sample, ids, mask in zip(
                batch.sample_ids, batch.token_ids, batch.response_mask, strict=True
            )
        }
        metrics = trainer.ppo_train(step)
        strategy.save_model(trainer.actor, None, f"{folder}/step{step}")
        differences = greedy_differences(strategy, f"{folder}/step{step}")
        steps.append((samples, metrics["logprob_diff_max"], differences))
    return steps


def greedy_differences(strategy, checkpoint):
    """Top-2 margins of a fresh model wherever the engine's greedy token is not its own."""
    from transformers import AutoModelForCausalLM

    strategy.wakeup_inference_engine()
    requests = [GenerationRequest(ids, request_id=i) for i, ids in enumerate(PROMPTS)]
    completions = strategy.inference_engine.generate(
        requests, SamplingParams(temperature=0.0, max_tokens=12)
    )
    fresh = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    margins = []
    for completion in completions:
        tokens = [*completion.prompt_token_ids, *completion.output_token_ids]
        with torch.no_grad():
            logits = fresh(torch.tensor([tokens]), use_cache=False).logits[0]
        start = len(completion.prompt_token_ids)
        for position, token in enumerate(completion.output_token_ids, start=start):
            best = logits[position - 1].topk(2)
            if int(best.indices[0]) != token:
                margins.append(float(best.values[0] - best.values[1]))
    return margins


def check_in_sync(results):
    for steps in results:
        for _, logprob_diff_max, margins in steps:
            assert logprob_diff_max < 1e-5
            assert all(margin < MARGIN for margin in margins)


def samples_of(results, step):
    return {key: ids for steps in results for key, ids in steps[step][0].items()}


def check_same_samples(actual, expected):
    """At least 99.9 % of all tokens are equal."""
    num_equal, num_tokens, first = 0, 0, None
    for step in range(NUM_STEPS):
        mine, theirs = samples_of(actual, step), samples_of(expected, step)
        assert mine.keys() == theirs.keys()
        for key, ids in sorted(theirs.items()):
            num_tokens += max(len(ids), len(mine[key]))
            num_equal += sum(a == b for a, b in zip(mine[key], ids, strict=False))
            if first is None and mine[key] != ids:
                first = f"step {step}, sample {key}"
    assert num_equal >= 0.999 * num_tokens, f"first difference: {first}"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("fake"))
    return run_multiprocess(train, 1, timeout_seconds=180, args=("fake", False, folder))


@pytest.mark.full
def test_one_process_is_in_sync_after_every_step(one_process):
    check_in_sync(one_process)


@pytest.mark.full
@pytest.mark.parametrize(
    "backend, world_size",
    [
        ("fsdp", 2),
        pytest.param("zero2", 2, marks=pytest.mark.deepspeed),
        pytest.param("zero3", 2, marks=pytest.mark.deepspeed),
    ],
)
def test_sharded_training_is_in_sync_and_samples_alike(backend, world_size, one_process, tmp_path):
    results = run_multiprocess(
        train, world_size, timeout_seconds=200, args=(backend, False, str(tmp_path))
    )
    check_in_sync(results)
    check_same_samples(results, one_process)


@pytest.mark.full
def test_tied_embeddings_stay_in_sync(tmp_path):
    results = run_multiprocess(train, 2, timeout_seconds=200, args=("fsdp", True, str(tmp_path)))
    check_in_sync(results)


def test_the_checks_catch_planted_differences(one_process):
    off = [[(samples, 1e-3, margins) for samples, _, margins in one_process[0]]]
    with pytest.raises(AssertionError):
        check_in_sync(off)
    moved = [
        [({k: [t + 1 for t in ids] for k, ids in s.items()}, d, m) for s, d, m in one_process[0]]
    ]
    with pytest.raises(AssertionError, match="step 0, sample 0"):
        check_same_samples(moved, one_process)
