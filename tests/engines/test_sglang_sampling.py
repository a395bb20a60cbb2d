"""The parts of the SGLang adapter that need no SGLang."""

import pytest
import torch
from tests.models.vision.tiny_families import build_tiny

from lightrft.engines import EngineConfig, SamplingParams
from lightrft.engines.rows import RawCompletion, RequestedSample, cut_at_token, first_job, next_job
from lightrft.engines.sglang.backend import hash_uint32
from lightrft.engines.sglang.engine import SGLangEngine, native_params, raw_of

VOCAB = 97


def answer(tokens, reason, *, logprobs=(), support=()):
    return {
        "output_ids": list(tokens),
        "meta_info": {
            "finish_reason": reason,
            "output_token_logprobs": [(p, t, None) for p, t in zip(logprobs, tokens, strict=False)],
            "output_token_sampling_logprobs": list(support),
        },
    }


def row(sample_index=0, max_tokens=8):
    return RequestedSample(0, 5, sample_index, (3, 4), max_tokens)


def test_logprobs_follow_the_law_that_tokens_were_drawn_from():
    given = answer((7, 8), {"type": "length"}, logprobs=(-1.0, -2.0), support=(-0.5, 0.0))
    assert raw_of(given, SamplingParams()) == RawCompletion((7, 8), (-1.0, -2.0), "length")
    assert raw_of(given, SamplingParams(top_k=2)) == RawCompletion((7, 8), (-0.5, 0.0), "length")
    stopped = answer((7,), {"type": "stop", "matched": 7}, logprobs=(-1.0,))
    assert raw_of(stopped, SamplingParams()).finish_reason == "stop"


def test_a_request_that_was_given_up_is_an_error_with_sglangs_words():
    with pytest.raises(RuntimeError, match="out of memory"):
        raw_of(answer((), {"type": "abort", "message": "out of memory"}), SamplingParams())


def natives(params, *, with_stops=True):
    job = first_job(row(), params)
    return native_params(job, params, [1, 2], with_stops=with_stops, vocab_size=VOCAB)


def test_parameters_are_those_of_sglang():
    plain = natives(SamplingParams(temperature=0.5, max_tokens=8))
    assert (plain["temperature"], plain["top_k"], plain["ignore_eos"]) == (0.5, -1, False)
    assert plain["stop_token_ids"] == [1, 2]
    # The kept tokens are told only where their number is bounded.
    assert natives(SamplingParams(top_p=0.5))["top_k"] == VOCAB
    assert natives(SamplingParams(top_k=1000))["top_k"] == VOCAB
    greedy = natives(SamplingParams(temperature=0.0, top_p=0.5))
    assert (greedy["top_p"], greedy["top_k"]) == (1.0, -1)
    assert natives(SamplingParams(), with_stops=False)["ignore_eos"] is True


def test_every_sample_has_a_seed_of_its_own_which_its_second_part_keeps():
    params = SamplingParams(n=4, min_tokens=4, max_tokens=8, seed=3)
    jobs = [first_job(row(i), params) for i in range(4)]
    assert len({job.seed for job in jobs}) == 4
    assert all(job.max_tokens == 3 for job in jobs)
    raw = RawCompletion((9, 9, 9), (-1.0,) * 3, "length")
    rest = next_job(row(2), raw, params, part=2)
    # Random numbers depend on seed and position, so the split is not seen in them.
    assert (rest.seed, rest.max_tokens, rest.prompt) == (jobs[2].seed, 5, (3, 4, 9, 9, 9))
    assert next_job(row(2, max_tokens=3), raw, params, part=2) is None


def test_stop_tokens_count_from_the_minimum_on():
    raw = RawCompletion((5, 1, 6, 1, 7), (-1.0,) * 5, "length")
    assert cut_at_token(raw, {1}, min_tokens=0) == RawCompletion((5, 1), (-1.0,) * 2, "stop")
    assert cut_at_token(raw, {1}, min_tokens=3) == RawCompletion((5, 1, 6, 1), (-1.0,) * 4, "stop")
    assert cut_at_token(raw, {9}, min_tokens=0) == raw


def test_the_hash_is_uniform_and_depends_on_seed_position_and_column():
    seeds = torch.tensor([3, 3, 4], dtype=torch.uint64)
    positions = torch.tensor([10, 11, 10])
    found = hash_uint32(seeds, positions, torch.arange(20_000))
    assert found.shape == (3, 20_000)
    assert int(found.min()) >= 0
    assert int(found.max()) < 2**32
    shares = found.double() / 2**32
    assert shares.mean(dim=1).tolist() == pytest.approx([0.5] * 3, abs=0.01)
    assert shares.var(dim=1).tolist() == pytest.approx([1 / 12] * 3, abs=0.003)
    correlations = torch.corrcoef(shares) - torch.eye(3).double()
    assert float(correlations.abs().max()) < 0.03
    again = hash_uint32(seeds[:1], positions[:1], torch.arange(20_000))
    assert torch.equal(again[0], found[0])


@pytest.mark.parametrize(
    "config, message",
    [
        (EngineConfig("sglang", "", dtype="int3"), "unknown dtype 'int3'"),
        (
            EngineConfig("sglang", "", tensor_parallel_size=2),
            r"runs on one device: got engine_tp_size 2.*sglang/issues/2736.*engine_type vllm",
        ),
        (EngineConfig("sglang", ""), "needs the directory of a Hugging Face checkpoint"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(config, message):
    with pytest.raises(ValueError, match=message):
        SGLangEngine(config)


def test_a_vision_language_model_is_refused_before_anything_starts():
    model, _ = build_tiny("tiny-qwen2.5-vl")
    with pytest.raises(ValueError, match=r"'qwen2_5_vl'.* use engine_type vllm or hf") as caught:
        SGLangEngine(EngineConfig("sglang", ""), module=model)
    assert "\n" not in str(caught.value)
