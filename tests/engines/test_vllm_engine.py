"""The real vLLM against a plain forward of the same weights, in fp32."""

import pytest
import torch
from tests.engines.plain_forward import (
    character_tokenizer,
    forward_logits,
    largest_error,
    random_prompts,
    send,
)
from tests.models.batches import perturb
from tests.ranks import run_multiprocess

from lightrft.engines import EngineConfig, SamplingParams, build_engine
from lightrft.engines.sampling import keep_support, pack_ids
from lightrft.engines.types import KEPT_IDS
from lightrft.kernels import hash_tensor

pytestmark = pytest.mark.vllm

BLOCK_SIZE = 32
MAX_MODEL_LEN = 256


# One token each.
WORDS = ["␀", "␄", "?", *map(chr, range(0x4E00, 0x4E00 + 94))]


@pytest.fixture(scope="module")
def started(tiny_model, tmp_path_factory):
    """The engine on its stock CPU path, and a model that holds the same weights."""
    directory = tmp_path_factory.mktemp("checkpoint")
    model = tiny_model("qwen3")
    model.save_pretrained(directory)
    character_tokenizer(WORDS).save_pretrained(directory)
    torch.manual_seed(123)
    state, set_num_threads = torch.random.get_rng_state(), torch.set_num_threads
    config = EngineConfig(
        "vllm", str(directory), max_model_len=MAX_MODEL_LEN, options={"block_size": BLOCK_SIZE}
    )
    engine = build_engine(config)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.set_num_threads is set_num_threads
    yield engine, model
    engine.close()


GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)


def test_greedy_tokens_are_those_of_a_plain_forward(started):
    engine, model = started
    completions = engine.generate(random_prompts(24, 12), GREEDY)
    for completion in completions:
        best = forward_logits(model, completion).argmax(-1)
        assert completion.output_token_ids == tuple(best.tolist())
    assert len({c.output_token_ids for c in completions}) > 20


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_a_plain_forward(started, temperature):
    engine, model = started
    params = SamplingParams(max_tokens=24, n=2, temperature=temperature, ignore_eos=True)
    completions = engine.generate(random_prompts(8, 9), params)
    assert largest_error(model, completions, temperature) < 1e-5
    # The other temperature's law is another one.
    assert min(largest_error(model, [c], temperature + 0.5) for c in completions) > 1e-2


def test_an_update_reaches_generation_from_cached_prompts(started):
    engine, model = started
    long_prompts = random_prompts(4, 200)
    send(engine, model)
    before = engine.generate(long_prompts, GREEDY)
    assert largest_error(model, before) < 1e-5
    perturb(model, 1)
    send(engine, model)
    after = engine.generate(long_prompts, GREEDY)
    assert largest_error(model, after) < 1e-5
    assert [c.output_token_ids for c in after] != [c.output_token_ids for c in before]

    perturb(model, 2)
    send(engine, model, resets_caches=False)
    stale = engine.generate(long_prompts, GREEDY)
    assert largest_error(model, stale) > 1e-2
    engine.reset_caches()
    fresh = engine.generate(long_prompts, GREEDY)
    assert largest_error(model, fresh) < 1e-5


def test_score_is_a_plain_forward_up_to_the_full_length(started):
    engine, model = started
    (request,) = random_prompts(1, MAX_MODEL_LEN)
    tokens = torch.tensor(request.prompt_token_ids)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(-1, tokens[1:, None])[:, 0]
    scores = engine.score(request.prompt_token_ids)
    assert scores[0] == 0
    assert float((torch.tensor(scores[1:]) - expected).abs().max()) < 1e-5


def test_repacked_weights_are_not_called_verifiable(started):
    engine, model = started
    send(engine, model)
    verifiable = {p.name for p in engine.parameter_manifest() if p.verifiable}
    parameters = dict(model.named_parameters())
    assert "model.norm.weight" in verifiable
    assert "model.embed_tokens.weight" in verifiable
    assert "lm_head.weight" not in verifiable
    assert "model.layers.0.self_attn.o_proj.weight" not in verifiable
    assert engine.hash_parameters() == {n: hash_tensor(parameters[n]) for n in verifiable}
    with pytest.raises(KeyError, match=r"cannot read back parameter 'lm_head\.weight'"):
        engine.hash_parameters(["lm_head.weight"])


def test_fused_parameters_name_each_other(started):
    engine, _ = started
    fused = {p.name.removeprefix("model.layers.0."): p for p in engine.parameter_manifest()}
    assert set(fused["mlp.up_proj.weight"].fused_with) == {"model.layers.0.mlp.gate_proj.weight"}
    assert len(fused["self_attn.q_proj.weight"].fused_with) == 2
    assert fused["mlp.down_proj.weight"].fused_with == ()


def test_stop_strings_end_a_completion_and_stay_in_it(started):
    engine, _ = started
    tokenizer = character_tokenizer(WORDS)
    stops = tuple(tokenizer.convert_ids_to_tokens(range(3, 40)))
    params = SamplingParams(max_tokens=12, n=4, ignore_eos=True, stop=stops)
    completions = engine.generate(random_prompts(4, 5), params)
    assert {c.finish_reason for c in completions} >= {"stop"}
    for completion in completions:
        hits = [3 <= token < 40 for token in completion.output_token_ids]
        assert not any(hits[:-1])
        assert hits[-1] == (completion.finish_reason == "stop")
    late = engine.generate(
        random_prompts(4, 5), SamplingParams(max_tokens=12, min_tokens=7, stop=stops)
    )
    for completion in late:
        hits = [3 <= token < 40 for token in completion.output_token_ids]
        assert len(hits) >= 7
        assert not any(hits[6:-1])


def test_flat_logprobs_give_the_same_tokens_and_logprobs(started, monkeypatch):
    from vllm import SamplingParams as NativeParams
    from vllm.logprobs import FlatLogprobs

    from lightrft.engines.vllm import engine as vllm_engine

    engine, model = started
    send(engine, model)
    forms = []
    real = vllm_engine.raw_completions_of

    def noting(job, outputs):
        forms.extend(type(output.logprobs) for output in outputs)
        return real(job, outputs)

    monkeypatch.setattr(vllm_engine, "raw_completions_of", noting)
    drawn = SamplingParams(max_tokens=40, n=3, seed=7, top_k=20, records_support=True)
    flat = engine.generate(random_prompts(4, 9), drawn)
    assert set(forms) == {FlatLogprobs}
    # As an older vLLM, which lacks the field.
    fields = [name for name in NativeParams.__struct_fields__ if name != "flat_logprobs"]
    monkeypatch.setattr(vllm_engine, "native_params", without_field(fields))
    forms.clear()
    plain = engine.generate(random_prompts(4, 9), drawn)
    assert set(forms) == {list}
    assert [c.output_token_ids for c in flat] == [c.output_token_ids for c in plain]
    assert [c.output_logprobs for c in flat] == [c.output_logprobs for c in plain]
    assert [c.facts for c in flat] == [c.facts for c in plain]
    assert all(flat[0].facts[KEPT_IDS])


TRUNCATIONS = {"top_p": 0.8, "top_k": 20, "min_p": 0.1, "temperature": 0.6}


@pytest.mark.parametrize(
    "options", [*({n: v} for n, v in TRUNCATIONS.items()), TRUNCATIONS], ids=str
)
def test_kept_ids_are_recorded_and_give_the_trainer_its_logprobs(started, options):
    engine, model = started
    send(engine, model)
    params = SamplingParams(
        max_tokens=20, n=4, seed=3, ignore_eos=True, records_support=True, **options
    )
    num_recorded = 0
    for completion in engine.generate(random_prompts(3, 7), params):
        ids = [*completion.prompt_token_ids, *completion.output_token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        logits = logits[len(completion.prompt_token_ids) - 1 : -1]
        scaled = logits.float()[:, : engine.vocab_size] / params.temperature
        law = keep_support(
            scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, min_p_first=True
        ).log_softmax(-1)
        drawn = law.gather(1, torch.tensor(completion.output_token_ids)[:, None])[:, 0]
        ratios = (drawn - torch.tensor(completion.output_logprobs)).exp()
        torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-5)
        for row, kept in zip(law, completion.facts.get(KEPT_IDS, ()), strict=False):
            if kept:
                assert kept == pack_ids(row.isfinite().nonzero().flatten())
                num_recorded += 1
    assert (num_recorded > 0) == (options.keys() != {"temperature"})
    if "top_k" in options:
        assert num_recorded == 12 * 20


def without_field(fields):
    """`native_params` of a vLLM whose sampling parameters have other fields."""
    import vllm

    from lightrft.engines.vllm.engine import native_params

    class Older:
        __struct_fields__ = tuple(fields)

        def __new__(cls, **options):
            return newer(**options)

    newer = vllm.SamplingParams

    def build(job, params, stop_ids, *, with_stops, num_logprobs=0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm, "SamplingParams", Older)
            return native_params(
                job, params, stop_ids, with_stops=with_stops, num_logprobs=num_logprobs
            )

    return build


def test_a_failed_call_leaves_nothing_queued(started, monkeypatch):
    engine, model = started
    send(engine, model)
    core = engine.native.llm_engine
    step, num_steps = core.step, 0

    def failing_step():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise MemoryError("planted")
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(core, "step", failing_step)
        with pytest.raises(MemoryError, match="planted"):
            engine.generate(random_prompts(3, 6), GREEDY)
    completions = engine.generate(random_prompts(2, 6), GREEDY)
    assert [c.request_id for c in completions] == [0, 1]
    assert largest_error(model, completions) < 1e-5
    engine.reset_caches()


def test_unknown_options_are_refused_before_anything_starts(tmp_path, tiny_model):
    tiny_model("qwen3").save_pretrained(tmp_path)
    config = EngineConfig("vllm", str(tmp_path), options={"blok_size": 32, "seed": 1})
    with pytest.raises(ValueError, match=r"blok_size \(did you mean block_size\?\), seed"):
        build_engine(config)


def test_vllms_own_sampling_parameters_are_converted_or_refused():
    from vllm import SamplingParams as NativeParams

    from lightrft.engines.native_params import params_of_native

    given = NativeParams(n=2, temperature=0.7, top_k=5, max_tokens=8, stop=["x"], logprobs=3)
    assert params_of_native(given) == SamplingParams(
        n=2, temperature=0.7, top_k=5, max_tokens=8, stop=("x",)
    )
    assert params_of_native(NativeParams()) == SamplingParams(max_tokens=16)
    assert params_of_native({"n": 2}) is None
    with pytest.raises(ValueError, match=r"presence_penalty=0\.5"):
        params_of_native(NativeParams(presence_penalty=0.5))
    with pytest.raises(ValueError, match="prompt_logprobs=1"):
        params_of_native(NativeParams(prompt_logprobs=1))


def score_with_two_engines(rank, world_size, directory):
    """Each in a process group of its own, as two runs in one process are."""
    found = []
    for _ in range(2):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        engine = build_engine(EngineConfig("vllm", directory, max_model_len=MAX_MODEL_LEN))
        found.append(engine.score([3, 4, 5]))
        engine.close()
        torch.distributed.destroy_process_group()
    return found


def test_a_second_engine_starts_after_the_first_and_its_process_group_ended(tiny_model, tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path)
    ((first, second),) = run_multiprocess(
        score_with_two_engines, 1, timeout_seconds=240, args=(str(tmp_path),)
    )
    assert first == pytest.approx(second, abs=1e-6)
