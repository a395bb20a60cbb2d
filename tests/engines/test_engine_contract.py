"""What every rollout engine must do, whatever it is made of."""

import contextlib
import dataclasses
import importlib
import math
from functools import partial

import pytest
import torch
from tests.engines import fake_engine  # noqa: F401 - registers "fake"
from tests.engines.plain_forward import prompts as counted_prompts

from lightrft.engines import (
    EngineConfig,
    EngineStatus,
    GenerationRequest,
    SamplingParams,
    StaleEngineError,
    WeightPiece,
    build_engine,
)
from lightrft.kernels import hash_tensor

VOCAB = 97
EOS = 1
MAX_MODEL_LEN = 64


def build_of(name, module):
    return build_engine(EngineConfig(name, "", max_model_len=MAX_MODEL_LEN), module=module)


class SharedEngine:
    """One engine for many tests: some take seconds to start. `fresh` undoes what tests did."""

    def __init__(self, name, module):
        self._name, self._module = name, module
        self._engine = None

    def fresh(self, weights):
        if self._engine is None:
            self._engine = build_of(self._name, self._module)
        engine = self._engine
        engine.abort()
        engine.wake_up()
        with contextlib.suppress(RuntimeError, ValueError):
            engine.finish_weight_update()
        update(engine, whole_pieces(weights))
        engine.set_weights_version(-1)
        return engine

    def close(self):
        if self._engine is not None:
            self._engine.close()
        self._engine = None


@pytest.fixture(scope="module")
def shared_vllm(tiny_model):
    """Storage as on a GPU: on a CPU vLLM repacks linear weights, which then cannot be read."""
    layers = importlib.import_module("vllm.model_executor.layers.utils")
    linear = torch.nn.functional.linear

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            layers,
            "dispatch_cpu_unquantized_gemm",
            lambda layer, remove_weight: setattr(layer, "cpu_linear", linear),
        )
        shared = SharedEngine("vllm", tiny_model("qwen3", is_tied=True))
        yield shared
        shared.close()


@pytest.fixture(scope="module")
def shared_sglang(tiny_model):
    shared = SharedEngine("sglang", tiny_model("qwen3", is_tied=True))
    yield shared
    shared.close()


@pytest.fixture(
    params=[
        "hf",
        "fake",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ]
)
def engine(request, tiny_model):
    name = request.param
    module = tiny_model("qwen3", is_tied=True) if name != "fake" else None
    if name in ("vllm", "sglang"):
        yield request.getfixturevalue(f"shared_{name}").fresh(
            {n: p.detach() for n, p in module.named_parameters()}
        )
        return
    engine = build_of(name, module)
    yield engine
    engine.close()


prompts = partial(counted_prompts, first_id=10)


def short_answer(engine):
    """Two tokens behind one prompt."""
    return engine.generate(prompts(3), SamplingParams(max_tokens=2))


def contents(completions):
    return [(c.request_id, c.sample_index, c.output_token_ids) for c in completions]


def whole_pieces(values):
    return [WeightPiece(n, tuple(v.shape), 0, v.reshape(-1)) for n, v in values.items()]


def hashes_of(values):
    return {name: hash_tensor(value) for name, value in values.items()}


def random_weights(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: (0.1 * torch.randn(p.shape, generator=generator)).to(p.dtype)
        for p in engine.parameter_manifest()
        if p.tied_to is None
    }


def fused_group(engine, name):
    """The parameter and those that must be sent with it."""
    manifest = {p.name: p for p in engine.parameter_manifest()}
    return [name, *manifest[name].fused_with]


def require_readable(engine):
    """Skips where an engine keeps its weights in a form or a process that cannot be read back."""
    if not any(p.verifiable for p in engine.parameter_manifest()):
        assert engine.hash_parameters() == {}
        pytest.skip(f"{engine.name} does not show its weights: a sync hashes what it hands over")


@pytest.fixture
def assert_holds(tiny_model):
    """Checks an engine's weights by their hashes, or else by what it computes with them."""

    def check(engine, values):
        if any(p.verifiable for p in engine.parameter_manifest()):
            assert engine.hash_parameters() == hashes_of(values)
            return
        model = tiny_model("qwen3", is_tied=True)
        model.load_state_dict(values, strict=False)
        tokens = torch.arange(2, 34)
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected = [0.0, *logprobs.gather(-1, tokens[1:, None]).squeeze(-1).tolist()]
        assert engine.score(tokens.tolist()) == pytest.approx(expected, abs=1e-4)

    return check


def update(engine, pieces):
    engine.begin_weight_update()
    engine.load_weights(pieces)
    engine.finish_weight_update()
    engine.reset_caches()


# Order and number


def test_completions_are_prompt_major_and_carry_their_prompts(engine):
    requests = prompts(5, 2, 7)
    completions = engine.generate(requests, SamplingParams(max_tokens=4, n=3))
    assert [(c.request_id, c.sample_index) for c in completions] == [
        (10 + i, j) for i in range(3) for j in range(3)
    ]
    assert [c.prompt_token_ids for c in completions] == [
        r.prompt_token_ids for r in requests for _ in range(3)
    ]
    assert len({c.output_token_ids for c in completions}) > 6


def test_no_requests_give_no_completions(engine):
    assert engine.generate([], SamplingParams(max_tokens=4)) == []


def test_a_request_may_bound_its_own_tokens(engine):
    a, b, c = prompts(3, 3, 5)
    b = GenerationRequest(b.prompt_token_ids, b.request_id, max_tokens=2)
    params = SamplingParams(max_tokens=9, n=2, ignore_eos=True)
    lengths = [len(x.output_token_ids) for x in engine.generate([a, b, c], params)]
    assert lengths == [9, 9, 2, 2, 9, 9]


# Streaming


def bounded(*bounds):
    """Requests with these bounds, prompts of two lengths."""
    requests = prompts(*(4 + i % 2 for i in range(len(bounds))))
    return [
        GenerationRequest(r.prompt_token_ids, r.request_id, max_tokens=bound)
        for r, bound in zip(requests, bounds, strict=True)
    ]


def polled(engine):
    batches = []
    while batch := engine.poll():
        batches.append(batch)
    return batches


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3),
        SamplingParams(n=2, temperature=0.7, top_k=20, seed=4, min_tokens=3),
        SamplingParams(n=2, temperature=0.0, ignore_eos=True),
    ],
    ids=["sampled", "truncated", "greedy"],
)
def test_polls_give_what_generate_gives(engine, params):
    requests = bounded(24, 3, 9, 3, 17)
    expected = engine.generate(requests, params)
    engine.submit(requests, params)
    batches = polled(engine)
    found = [completion for batch in batches for completion in batch]
    assert len(found) == len(expected)
    # The same calls in the same order: nothing may differ, not even near-ties.
    assert sorted(found, key=lambda c: (c.request_id, c.sample_index)) == expected
    assert len(batches) > 1 if engine.streams else len(batches) <= 2
    # The comparison sees one changed draw.
    other = engine.generate(requests, dataclasses.replace(params, seed=9, temperature=1.3))
    assert contents(other) != contents(expected)


def test_generate_tells_what_ends_as_it_ends(engine):
    requests, params, told = bounded(20, 2, 9), SamplingParams(n=2), []
    completions = engine.generate(requests, params, on_finished=told.append)
    assert contents(completions) == contents(engine.generate(requests, params))
    flat = [completion for batch in told for completion in batch]
    assert sorted(map(id, flat)) == sorted(map(id, completions))


def test_nothing_else_is_asked_of_an_engine_that_samples(engine):
    params = SamplingParams(n=2, ignore_eos=True)
    expected = engine.generate(bounded(12, 3), params)
    engine.submit(bounded(12, 3), params)
    if engine.streams:
        engine.poll()
    for action in (
        lambda: engine.submit(bounded(3), params),
        lambda: engine.generate(bounded(3), params),
        lambda: engine.score([3, 4]),
        engine.begin_weight_update,
        engine.sleep,
    ):
        with pytest.raises(RuntimeError, match=r"still samples \d completions; poll\(\)"):
            action()
    assert polled(engine)
    assert contents(engine.generate(bounded(12, 3), params)) == contents(expected)


def test_an_abort_forgets_what_was_submitted(engine):
    params = SamplingParams(n=2, ignore_eos=True)
    expected = engine.generate(bounded(12, 3), params)
    engine.submit(bounded(30, 3), params)
    if engine.streams:
        engine.poll()
    engine.abort()
    engine.abort()
    assert engine.poll() == []
    update(engine, whole_pieces(random_weights(engine, 1)))  # a backend refuses it if it is busy
    assert contents(engine.generate(bounded(12, 3), params)) != contents(expected)

    def give_up(completions):
        raise InterruptedError(f"after {len(completions)}")

    with pytest.raises(InterruptedError):
        engine.generate(bounded(30, 3), params, on_finished=give_up)
    assert len(engine.generate(bounded(2), params)) == 2


def test_weights_that_change_between_polls_end_the_call(engine):
    params = SamplingParams(ignore_eos=True)
    engine.submit(bounded(12, 3), params)
    engine.mark_stale("the optimizer has stepped")
    with pytest.raises(StaleEngineError, match="the optimizer has stepped"):
        engine.poll()
    assert engine.poll() == []


# Versions and stops


def test_a_completion_knows_the_version_of_its_weights(engine):
    params = SamplingParams(max_tokens=2)
    assert engine.generate(prompts(3), params)[0].weights_version == -1
    engine.set_weights_version(5)
    assert engine.generate(prompts(3), params)[0].weights_version == 5


# Stopping


def test_a_stop_token_ends_a_completion_and_stays_in_it(engine):
    stop_ids = tuple(range(2, VOCAB, 4))
    params = SamplingParams(max_tokens=6, n=20, stop_token_ids=stop_ids, ignore_eos=True)
    completions = engine.generate(prompts(4, 3), params)
    reasons = {"stop": 0, "length": 0}
    for completion in completions:
        reasons[completion.finish_reason] += 1
        hits = [t in stop_ids for t in completion.output_token_ids]
        assert not any(hits[:-1])
        assert hits[-1] == (completion.finish_reason == "stop")
        if completion.finish_reason == "length":
            assert len(hits) == 6
    assert reasons["stop"] > 5
    assert reasons["length"] > 0


def test_end_of_sequence_stops_unless_ignored(engine):
    requests = prompts(*[3] * 12)
    stopped = engine.generate(requests, SamplingParams(max_tokens=40, n=8))
    ended = [c for c in stopped if c.finish_reason == "stop"]
    assert ended
    assert all(c.output_token_ids[-1] == EOS for c in ended)
    assert all(EOS not in c.output_token_ids[:-1] for c in stopped)
    ignored = engine.generate(requests, SamplingParams(max_tokens=40, n=8, ignore_eos=True))
    assert {len(c.output_token_ids) for c in ignored} == {40}
    # Ignoring changes when a row ends, not what it draws.
    for short, long in zip(stopped, ignored, strict=True):
        assert long.output_token_ids[: len(short.output_token_ids)] == short.output_token_ids


def test_no_stop_is_honoured_before_min_tokens(engine):
    every_id = tuple(range(VOCAB))
    params = SamplingParams(max_tokens=9, min_tokens=6, n=3, stop_token_ids=every_id)
    for completion in engine.generate(prompts(2, 5), params):
        assert len(completion.output_token_ids) == 6
        assert completion.finish_reason == "stop"


# Log-probabilities


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_logprobs_agree_with_score_and_greedy_takes_likely_tokens(engine, temperature):
    params = SamplingParams(max_tokens=8, n=2, temperature=temperature, ignore_eos=True)
    for completion in engine.generate(prompts(1, 4, 9), params):
        assert completion.logprobs_mode == "temperature"
        prompt = completion.prompt_token_ids
        sequence = prompt + completion.output_token_ids
        scores = engine.score(sequence)
        assert scores[0] == 0
        scores = scores[len(prompt) :]
        assert completion.output_logprobs == pytest.approx(scores, rel=0, abs=1e-5)
        if temperature == 0:
            other = engine.score((*prompt, (sequence[len(prompt)] + 1) % VOCAB))
            assert other[-1] < scores[0]


def test_a_law_cut_to_one_token_has_logprob_zero(engine):
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    expected = contents(engine.generate(prompts(4, 2), greedy))
    for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        params = SamplingParams(max_tokens=6, ignore_eos=True, **cut)
        if engine.name == "sglang" and "min_p" in cut:
            with pytest.raises(ValueError, match="cannot draw by a seed with min_p"):
                engine.generate(prompts(4, 2), params)
            continue
        completions = engine.generate(prompts(4, 2), params)
        assert contents(completions) == expected
        assert {c.logprobs_mode for c in completions} == {"truncated"}
        assert all(p == 0 for c in completions for p in c.output_logprobs)


def test_truncated_logprobs_are_renormalised_over_the_kept_tokens(engine):
    """With top_k = 2 the two laws differ by one constant a position: log of the kept mass."""
    params = SamplingParams(max_tokens=1, n=64, top_k=2)
    completions = engine.generate(prompts(5), params)
    logprob_of = {c.output_token_ids[0]: c.output_logprobs[0] for c in completions}
    assert len(logprob_of) == 2
    assert sum(map(math.exp, logprob_of.values())) == pytest.approx(1, abs=1e-6)
    prompt = completions[0].prompt_token_ids
    gaps = [engine.score((*prompt, token))[-1] - value for token, value in logprob_of.items()]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-5)
    assert gaps[0] < 0


def test_temperature_sharpens_the_law(engine):
    params = SamplingParams(max_tokens=1, n=200, temperature=0.3)
    completions = engine.generate(prompts(4), params)
    prompt = completions[0].prompt_token_ids
    # log p_T(a) - log p_T(b) = (log p_1(a) - log p_1(b)) / T
    sampled = {c.output_token_ids[0]: c.output_logprobs[0] for c in completions}
    (a, lp_a), (b, lp_b) = list(sampled.items())[:2]
    score_a, score_b = engine.score((*prompt, a))[-1], engine.score((*prompt, b))[-1]
    assert lp_a - lp_b == pytest.approx((score_a - score_b) / 0.3, abs=1e-4)


# Random numbers


def test_a_request_draws_the_same_alone_and_in_any_company(engine):
    params = SamplingParams(max_tokens=10, n=2, seed=3)
    requests = prompts(5, 2, 7, 5)
    together = {(c.request_id, c.sample_index): c for c in engine.generate(requests, params)}
    backwards = engine.generate(requests[::-1], params)
    alone = [c for r in requests for c in engine.generate([r], params)]
    for completion in [*backwards, *alone]:
        reference = together[completion.request_id, completion.sample_index]
        assert completion.output_token_ids == reference.output_token_ids
        assert completion.output_logprobs == pytest.approx(reference.output_logprobs, abs=1e-5)


def test_seed_request_and_sample_all_change_the_draw(engine):
    request = prompts(5)[0]
    params = SamplingParams(max_tokens=10, n=2, ignore_eos=True)
    base = engine.generate([request], params)
    seeded = engine.generate([request], SamplingParams(max_tokens=10, ignore_eos=True, seed=1))
    renamed = engine.generate([GenerationRequest(request.prompt_token_ids, 99)], params)
    outputs = {c.output_token_ids for c in [*base, *seeded, *renamed]}
    assert len(outputs) == 5


def test_generate_leaves_the_global_generator_and_threads_alone(engine):
    state = torch.random.get_rng_state()
    engine.generate(prompts(3, 4), SamplingParams(max_tokens=5, n=2))
    engine.score([3, 4, 5])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == 1
    assert torch.is_grad_enabled()


def test_other_threads_than_at_the_start_change_no_score(engine):
    tokens = list(range(3, 40))
    expected = engine.score(tokens)
    torch.set_num_threads(3)
    assert engine.score(tokens) == pytest.approx(expected, abs=1e-5)
    assert torch.get_num_threads() == 3


# Malformed requests


@pytest.mark.parametrize(
    "requests, message",
    [
        ([GenerationRequest((), 7)], "request 7 has an empty prompt"),
        ([GenerationRequest((5,), 7), GenerationRequest((6,), 7)], "got 7 twice"),
        ([GenerationRequest((5,) * 60, 8)], "request 8 needs 60 prompt tokens"),
        ([GenerationRequest((5,), 9, max_tokens=0)], "request 9: max_tokens must be at least 1"),
    ],
)
def test_a_malformed_request_is_named(engine, requests, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(requests, SamplingParams(max_tokens=10))


# Weights


def test_the_manifest_lists_each_name_once_and_says_what_is_tied(engine):
    manifest = engine.parameter_manifest()
    names = [p.name for p in manifest]
    assert len(set(names)) == len(names)
    assert manifest == engine.parameter_manifest()
    tied = [p for p in manifest if p.tied_to is not None]
    assert len(tied) == 1
    assert tied[0].tied_to in names
    assert all(p.dtype == torch.float32 and p.numel > 0 for p in manifest)


def test_hashes_are_those_of_the_weights_that_were_loaded(engine):
    require_readable(engine)
    values = random_weights(engine, 1)
    before = engine.hash_parameters()
    update(engine, whole_pieces(values))
    hashes = engine.hash_parameters()
    assert hashes == hashes_of(values)
    assert all(hashes[name] != before[name] for name in values)
    first = next(iter(values))
    assert engine.hash_parameters([first]) == {first: hashes[first]}


def test_new_weights_change_what_is_sampled_and_old_ones_restore_it(engine):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = random_weights(engine, 1), random_weights(engine, 2)
    outputs = []
    for values in (first, second, first):
        update(engine, whole_pieces(values))
        outputs.append(engine.generate(prompts(4, 6), params))
    assert contents(outputs[0]) != contents(outputs[1])
    assert contents(outputs[0]) == contents(outputs[2])
    assert outputs[0][0].output_logprobs == outputs[2][0].output_logprobs


def test_a_parameter_may_arrive_in_pieces_and_calls_in_any_order(engine, assert_holds):
    values = random_weights(engine, 4)
    engine.begin_weight_update()
    for name, value in reversed(values.items()):
        flat, cut = value.reshape(-1), value.numel() // 3
        shape = tuple(value.shape)
        engine.load_weights([WeightPiece(name, shape, cut, flat[cut:].clone())])
        engine.load_weights(WeightPiece(name, shape, 0, flat[:cut].clone()) for _ in range(1))
    engine.finish_weight_update()
    engine.reset_caches()
    assert_holds(engine, values)


def test_loading_does_not_keep_the_callers_tensor(engine, assert_holds):
    values = random_weights(engine, 4)
    expected = {n: v.clone() for n, v in values.items()}
    update(engine, whole_pieces(values))
    for value in values.values():
        value.zero_()
    assert_holds(engine, expected)


def test_generate_is_refused_until_the_update_is_over_and_caches_are_reset(engine):
    params = SamplingParams(max_tokens=2)
    pieces = whole_pieces(random_weights(engine, 1))
    engine.begin_weight_update()
    with pytest.raises(StaleEngineError, match="a weight update is open"):
        engine.generate(prompts(3), params)
    engine.load_weights(pieces)
    engine.finish_weight_update()
    with pytest.raises(StaleEngineError, match="reset_caches"):
        engine.generate(prompts(3), params)
    engine.set_weights_version(1)
    with pytest.raises(StaleEngineError, match="reset_caches"):
        engine.score([3, 4])
    engine.reset_caches()
    assert len(engine.generate(prompts(3), params)) == 1


def test_a_reset_within_an_update_does_not_end_it(engine):
    engine.begin_weight_update()
    engine.reset_caches()
    with pytest.raises(StaleEngineError, match="open"):
        short_answer(engine)


def test_an_engine_marked_stale_waits_for_verified_weights(engine):
    engine.mark_stale("the optimizer has stepped")
    with pytest.raises(StaleEngineError, match="the optimizer has stepped"):
        short_answer(engine)
    update(engine, whole_pieces(random_weights(engine, 1)))
    engine.set_weights_version(1)
    short_answer(engine)


def test_a_parameter_written_in_part_is_named_and_blocks_the_engine(engine):
    values = random_weights(engine, 1)
    name = next(iter(values))
    flat = values[name].reshape(-1)
    engine.begin_weight_update()
    engine.load_weights([WeightPiece(name, tuple(values[name].shape), 1, flat[1:])])
    with pytest.raises(ValueError, match=rf"{name} \({flat.numel() - 1} of {flat.numel()} elem"):
        engine.finish_weight_update()
    engine.reset_caches()
    with pytest.raises(StaleEngineError, match=name):
        short_answer(engine)
    update(engine, whole_pieces({name: values[name]}))
    short_answer(engine)


def test_a_part_of_a_fused_tensor_is_refused_and_named(engine):
    values = random_weights(engine, 1)
    fused = next((p for p in engine.parameter_manifest() if p.fused_with), None)
    if fused is None:
        pytest.skip(f"the {engine.name} engine has no fused tensors")
    hashes = engine.hash_parameters()
    engine.begin_weight_update()
    engine.load_weights(whole_pieces({fused.name: values[fused.name]}))
    with pytest.raises(ValueError, match=rf"{fused.name} \(without .* of the same engine tensor"):
        engine.finish_weight_update()
    engine.reset_caches()
    assert engine.hash_parameters() == hashes
    with pytest.raises(StaleEngineError, match=fused.name):
        short_answer(engine)
    update(engine, whole_pieces({n: values[n] for n in fused_group(engine, fused.name)}))
    short_answer(engine)


def test_overlapping_pieces_do_not_hide_a_gap(engine):
    values = random_weights(engine, 1)
    name = next(iter(values))
    flat, shape = values[name].reshape(-1), tuple(values[name].shape)
    half = flat.numel() // 2
    engine.begin_weight_update()
    engine.load_weights([WeightPiece(name, shape, 0, flat[:half].clone()) for _ in range(2)])
    with pytest.raises(ValueError, match="written in part"):
        engine.finish_weight_update()


def test_pieces_that_do_not_fit_the_manifest_are_refused(engine):
    manifest = {p.name: p for p in engine.parameter_manifest()}
    plain = next(p for p in manifest.values() if p.tied_to is None)
    tied = next(p for p in manifest.values() if p.tied_to is not None)
    values = torch.zeros(plain.numel)
    engine.begin_weight_update()
    with pytest.raises(KeyError, match="no parameter 'unknown'"):
        engine.load_weights([WeightPiece("unknown", plain.shape, 0, values)])
    with pytest.raises(KeyError, match="shares the storage"):
        engine.load_weights([WeightPiece(tied.name, tied.shape, 0, torch.zeros(tied.numel))])
    with pytest.raises(ValueError, match="shape of"):
        engine.load_weights([WeightPiece(plain.name, (*plain.shape, 1), 0, values)])
    with pytest.raises(ValueError, match="dtype of"):
        engine.load_weights([WeightPiece(plain.name, plain.shape, 0, values.half())])
    with pytest.raises(ValueError, match="piece of"):
        engine.load_weights([WeightPiece(plain.name, plain.shape, 1, values)])


def test_the_steps_of_an_update_are_checked(engine):
    piece = whole_pieces(random_weights(engine, 1))[:1]
    with pytest.raises(RuntimeError, match="begin_weight_update"):
        engine.load_weights(piece)
    with pytest.raises(RuntimeError, match="begin_weight_update"):
        engine.finish_weight_update()
    engine.begin_weight_update()
    with pytest.raises(RuntimeError, match="open already"):
        engine.begin_weight_update()


# Sleep


def test_sleep_level_one_keeps_the_weights(engine):
    params = SamplingParams(max_tokens=6)
    before = engine.generate(prompts(4), params)
    hashes = engine.hash_parameters()
    engine.sleep(1)
    assert engine.status is EngineStatus.SLEEPED
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.generate(prompts(4), params)
    engine.wake_up()
    assert engine.status is EngineStatus.WAKEUP
    assert engine.hash_parameters() == hashes
    assert engine.generate(prompts(4), params) == before


def test_sleep_level_two_drops_the_weights_until_all_are_sent_again(engine):
    params = SamplingParams(max_tokens=4)
    values = random_weights(engine, 1)
    update(engine, whole_pieces(values))
    engine.set_weights_version(1)
    before = engine.generate(prompts(4), params)
    assert not engine.weights_were_dropped
    engine.sleep(2)
    engine.wake_up()
    assert engine.weights_were_dropped
    with pytest.raises(StaleEngineError, match="hold no weights"):
        engine.generate(prompts(4), params)
    first, *rest = whole_pieces(values)
    update(engine, rest)
    assert engine.weights_were_dropped
    with pytest.raises(StaleEngineError, match=first.name):
        engine.generate(prompts(4), params)
    update(engine, [first])
    assert not engine.weights_were_dropped
    assert engine.generate(prompts(4), params) == before


def test_weights_can_be_woken_and_written_before_the_cache(engine, assert_holds):
    values = random_weights(engine, 1)
    engine.sleep(1)
    engine.wake_up(("weights",))
    assert engine.status is EngineStatus.SLEEPED
    update(engine, whole_pieces(values))
    engine.wake_up(("kv_cache",))
    assert engine.status is EngineStatus.WAKEUP
    assert_holds(engine, values)


def test_sleeping_weights_can_be_neither_written_nor_hashed(engine):
    engine.sleep(2)
    with pytest.raises(RuntimeError, match="wake_up"):
        engine.hash_parameters()
    engine.begin_weight_update()
    with pytest.raises(RuntimeError, match="wake_up"):
        engine.load_weights([])


def test_wrong_sleep_levels_and_tags_are_refused(engine):
    with pytest.raises(ValueError, match="level must be 1 or 2: got 3"):
        engine.sleep(3)
    with pytest.raises(ValueError, match="unknown wake-up tags"):
        engine.wake_up(("cache",))


# Aliases


@pytest.fixture
def aliasing_engine(engine):
    if engine.name in ("vllm", "sglang"):
        pytest.skip(f"{engine.name} keeps storage of its own")
    return engine


def test_an_aliased_engine_sees_the_callers_changes(aliasing_engine):
    engine = aliasing_engine
    values = random_weights(engine, 1)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    assert engine.alias_weights(values)
    before = engine.generate(prompts(4), params)
    for value in values.values():
        value.neg_()
    engine.reset_caches()
    assert contents(engine.generate(prompts(4), params)) != contents(before)
    assert engine.hash_parameters() == hashes_of(values)
    engine.sleep(2)
    engine.wake_up()
    assert all(value.numel() > 0 for value in values.values())
    assert engine.hash_parameters() == hashes_of(values)


def test_an_update_after_an_alias_leaves_the_callers_tensors_alone(aliasing_engine):
    engine = aliasing_engine
    shared, sent = random_weights(engine, 1), random_weights(engine, 2)
    assert engine.alias_weights(shared)
    kept = hashes_of(shared)
    first, *_ = whole_pieces(sent)
    update(engine, [first])
    assert hashes_of(shared) == kept
    assert engine.hash_parameters() == {**kept, first.name: hash_tensor(first.tensor)}


def test_tensors_that_do_not_fit_are_not_aliased(engine):
    values = random_weights(engine, 1)
    hashes = engine.hash_parameters()
    name = next(iter(values))
    assert not engine.alias_weights({**values, name: values[name].double()})
    assert not engine.alias_weights({**values, name: values[name][1:]})
    assert not engine.alias_weights({**values, "unknown": values[name]})
    assert engine.hash_parameters() == hashes


def test_a_closed_engine_does_not_generate(engine):
    engine.close()
    with pytest.raises(RuntimeError):
        short_answer(engine)
