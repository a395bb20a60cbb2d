import inspect

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.engines.altered_engines import embedded
from tests.engines.plain_forward import character_tokenizer, largest_error, prompts
from tests.models.tiny import tiny_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM, Qwen3ForCausalLM

from lightrft.engines import (
    EngineConfig,
    GenerationRequest,
    SamplingParams,
    StaleEngineError,
    WeightPiece,
)
from lightrft.engines.hf.engine import HFEngine
from lightrft.engines.hf.forward import ModelTraits

CONFIG = EngineConfig("hf", "")
FAMILIES = [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)]


def greedy_generate(model, request, max_tokens):
    ids = torch.tensor([request.prompt_token_ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return tuple(output[0, ids.shape[1] :].tolist())


# Decoding


@pytest.mark.parametrize("family, is_tied", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(tiny_model, family, is_tied):
    model = tiny_model(family, is_tied=is_tied)
    engine = embedded(model)
    requests = prompts(5, 1, 9, 5)
    params = SamplingParams(max_tokens=24, temperature=0)
    for request, completion in zip(requests, engine.generate(requests, params), strict=True):
        assert completion.output_token_ids == greedy_generate(model, request, 24)


@pytest.mark.parametrize("family, is_tied", FAMILIES)
@pytest.mark.parametrize("lengths", [(6, 6, 6), (5, 1, 12, 2)])
def test_logprobs_are_those_of_a_plain_forward(tiny_model, family, is_tied, lengths):
    model = tiny_model(family, is_tied=is_tied)
    engine = embedded(model)
    for temperature in (1.0, 0.7):
        params = SamplingParams(max_tokens=20, n=3, temperature=temperature)
        completions = engine.generate(prompts(*lengths), params)
        assert largest_error(model, completions, temperature) < 1e-5


def test_a_planted_weight_error_moves_logprobs(tiny_model):
    """Positive control: what the comparisons above would see."""
    model = tiny_model()
    engine = embedded(model)
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.T.contiguous()
    completions = engine.generate(prompts(5, 3), SamplingParams(max_tokens=10))
    assert largest_error(model, completions) > 1e-2


def test_long_completions_cross_blocks_of_steps(tiny_model):
    model = tiny_model()
    engine = embedded(model)
    params = SamplingParams(max_tokens=150, n=2, ignore_eos=True)
    for lengths in ((4, 4), (3, 8)):
        completions = engine.generate(prompts(*lengths), params)
        assert {len(c.output_token_ids) for c in completions} == {150}
        assert largest_error(model, completions) < 1e-5


def test_rows_that_end_at_different_times_do_not_disturb_the_others(tiny_model):
    model = tiny_model()
    engine = embedded(model)
    requests = [
        GenerationRequest(r.prompt_token_ids, r.request_id, max_tokens=3 + 5 * r.request_id)
        for r in prompts(4, 7, 2, 9, 4, 4, 1)
    ]
    completions = engine.generate(requests, SamplingParams(n=3, stop_token_ids=(3, 30, 60)))
    lengths = [len(c.output_token_ids) for c in completions]
    assert len(set(lengths)) > 8
    assert largest_error(model, completions) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_implementations_agree(tiny_model, attention):
    model = tiny_model()
    config = EngineConfig("hf", "", options={"attn_implementation": attention})
    engine = HFEngine(config, module=model)
    completions = engine.generate(prompts(5, 2, 7), SamplingParams(max_tokens=10, n=2))
    assert largest_error(model, completions) < 1e-5


def test_bfloat16_logprobs_are_close_to_a_bfloat16_forward(tiny_model):
    model = tiny_model()
    engine = HFEngine(EngineConfig("hf", "", dtype="bfloat16"), module=model)
    assert {p.dtype for p in engine.parameter_manifest()} == {torch.bfloat16}
    completions = engine.generate(prompts(5, 2), SamplingParams(max_tokens=10, n=2))
    assert largest_error(engine.native, completions) < 0.1


def test_a_failing_model_is_reported_not_sampled(tiny_model):
    model = tiny_model()
    engine = embedded(model)
    engine.native.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="request 0: the model's logits are not finite"):
        engine.generate(prompts(3), SamplingParams(max_tokens=3))


# Models whose cache cannot be padded or cut


def sliding_model():
    return tiny_model(
        vocab_size=97,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        eos_token_id=1,
        pad_token_id=0,
    ).eval()


def test_a_sliding_window_model_is_decoded_as_by_transformers():
    model = sliding_model()
    engine = embedded(model)
    requests = prompts(9, 4, 9, 2)
    greedy = engine.generate(requests, SamplingParams(max_tokens=14, temperature=0))
    for request, completion in zip(requests, greedy, strict=True):
        assert completion.output_token_ids == greedy_generate(model, request, 14)
    sampled = engine.generate(requests, SamplingParams(max_tokens=14, n=2))
    assert [c.request_id for c in sampled] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert largest_error(model, sampled) < 1e-5


def test_a_state_space_model_decodes_whole_batches():
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2, eos_token_id=1
    )
    model = MambaForCausalLM(config).eval()
    engine = embedded(model)
    completions = engine.generate(prompts(5, 3, 5), SamplingParams(max_tokens=8, n=2))
    assert largest_error(model, completions) < 1e-4


# Stopping


# One character a token, the special ones included.
WORDS = ["␀", "␄", *(chr(ord("!") + i) for i in range(94)), " "]


def with_tokenizer(model, folder):
    model.save_pretrained(folder)
    character_tokenizer(WORDS).save_pretrained(folder)
    return HFEngine(EngineConfig("hf", str(folder)))


def test_stop_strings_end_a_completion_where_their_last_token_falls(tiny_model, tmp_path):
    engine = with_tokenizer(tiny_model(), tmp_path)
    free = SamplingParams(max_tokens=30, n=4, ignore_eos=True)
    text_of = [
        "".join(character_tokenizer(WORDS).convert_ids_to_tokens(c.output_token_ids))
        for c in engine.generate(prompts(4, 2), free)
    ]
    stop = text_of[0][10:12]
    params = SamplingParams(max_tokens=30, n=4, ignore_eos=True, stop=(stop, "never in it"))
    for text, completion in zip(text_of, engine.generate(prompts(4, 2), params), strict=True):
        place = text.find(stop)
        expected = 30 if place < 0 else place + 2
        assert len(completion.output_token_ids) == expected
        assert completion.finish_reason == ("length" if place < 0 else "stop")
    late = SamplingParams(max_tokens=30, min_tokens=20, ignore_eos=True, stop=(stop,))
    assert len(engine.generate(prompts(4), late)[0].output_token_ids) >= 20


def test_stop_strings_without_a_tokenizer_say_what_to_do(tiny_model):
    engine = embedded(tiny_model())
    with pytest.raises(FileNotFoundError, match=r"need a tokenizer.*use stop_token_ids"):
        engine.generate(prompts(3), SamplingParams(stop=("x",), max_tokens=4))


def test_a_prompt_may_be_given_as_text(tiny_model, tmp_path):
    engine = with_tokenizer(tiny_model(), tmp_path)
    request = GenerationRequest((), 4, prompt_text='"#$')
    (completion,) = engine.generate([request], SamplingParams(max_tokens=2))
    assert completion.prompt_token_ids == (3, 4, 5)


def test_every_end_of_sequence_id_of_the_generation_config_stops(tiny_model):
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=list(range(2, 97, 3)))
    engine = embedded(model)
    completions = engine.generate(prompts(3, 4), SamplingParams(max_tokens=40, n=5))
    ends = {c.output_token_ids[-1] for c in completions if c.finish_reason == "stop"}
    assert ends
    assert all(e == 1 or e % 3 == 2 for e in ends)


# Requests


def test_token_ids_outside_the_vocabulary_are_refused(tiny_model):
    engine = embedded(tiny_model())
    with pytest.raises(ValueError, match=r"request 2 .* got 3 .. 97, expected 0 .. 96"):
        engine.generate([GenerationRequest((3, 97), 2)], SamplingParams(max_tokens=3))


def test_the_models_own_length_is_the_default_limit(tiny_model):
    engine = embedded(tiny_model())
    with pytest.raises(ValueError, match="max_model_len 256"):
        engine.generate(prompts(250), SamplingParams(max_tokens=7))
    assert len(engine.generate(prompts(250), SamplingParams(max_tokens=6))) == 1


def test_score_of_short_sequences(tiny_model):
    engine = embedded(tiny_model())
    assert engine.score([]) == []
    assert engine.score([5]) == [0.0]


# Weights


def test_the_engine_has_storage_of_its_own(tiny_model):
    model = tiny_model(is_tied=True)
    engine = embedded(model)
    theirs = {p.untyped_storage().data_ptr() for p in model.parameters()}
    ours = {p.untyped_storage().data_ptr() for p in engine.native.parameters()}
    assert not theirs & ours
    assert not any(p.requires_grad for p in engine.native.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_building_an_engine_leaves_generator_and_default_dtype_alone(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    state = torch.random.get_rng_state()
    HFEngine(EngineConfig("hf", "", dtype="bfloat16"), module=model)
    HFEngine(EngineConfig("hf", str(tmp_path), dtype="bfloat16"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32


def test_a_checkpoint_gives_the_same_engine_as_its_module(tiny_model, tmp_path):
    model = tiny_model(is_tied=True)
    model.save_pretrained(tmp_path)
    one, other = embedded(model), HFEngine(EngineConfig("hf", str(tmp_path)))
    assert one.parameter_manifest() == other.parameter_manifest()
    assert one.hash_parameters() == other.hash_parameters()
    params = SamplingParams(max_tokens=6, n=2)
    pairs = zip(*(e.generate(prompts(4, 2), params) for e in (one, other)), strict=True)
    for mine, theirs in pairs:
        assert mine.output_token_ids == theirs.output_token_ids
        assert mine.output_logprobs == pytest.approx(theirs.output_logprobs, abs=1e-5)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 parameters \(first: model.norm.weight\)"):
        HFEngine(EngineConfig("hf", str(tmp_path)))


def test_sharded_parameters_must_be_sent_before_the_first_token(tiny_model):
    source = tiny_model()
    values = {n: p.detach().clone() for n, p in source.named_parameters()}
    module = tiny_model()
    sharded = [n for n, _ in module.named_parameters() if "mlp" in n]
    for name in sharded:
        # What ZeRO-3 leaves of a parameter between forwards.
        module.get_parameter(name).data = torch.empty(0)
    engine = embedded(module)
    with pytest.raises(StaleEngineError, match=f"{len(sharded)} parameters hold no weights"):
        engine.generate(prompts(3), SamplingParams(max_tokens=2))
    engine.begin_weight_update()
    engine.load_weights(
        WeightPiece(n, tuple(values[n].shape), 0, values[n].reshape(-1)) for n in sharded
    )
    engine.finish_weight_update()
    engine.reset_caches()
    completions = engine.generate(prompts(3), SamplingParams(max_tokens=8))
    assert largest_error(source, completions) < 1e-5


def test_a_module_sharded_by_fsdp_gives_its_architecture(tiny_model):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = fully_shard(tiny_model(is_tied=True))
        engine = embedded(module)
        assert type(engine.native) is Qwen3ForCausalLM
        with pytest.raises(StaleEngineError, match="hold no weights"):
            engine.score([3, 4])
    finally:
        dist.destroy_process_group()


def test_level_two_sleep_frees_the_storage(tiny_model):
    engine = embedded(tiny_model())
    engine.sleep(2)
    assert sum(p.untyped_storage().nbytes() for p in engine.native.parameters()) == 0
    engine.wake_up()
    shapes = {n: tuple(p.shape) for n, p in engine.native.named_parameters()}
    assert shapes == {p.name: p.shape for p in engine.parameter_manifest()}


def test_wrong_configurations_say_what_is_expected(tiny_model, tmp_path):
    with pytest.raises(
        ValueError, match=r"unusable options of the hf engine: speed .*; known: attn"
    ):
        HFEngine(EngineConfig("hf", "", options={"speed": 1}), module=tiny_model())
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        HFEngine(EngineConfig("hf", "", dtype="int8"), module=tiny_model())
    with pytest.raises(FileNotFoundError, match="is none; pass the path"):
        HFEngine(EngineConfig("hf", str(tmp_path / "absent")))
    with pytest.raises(TypeError, match=r"pass the inner model of a wrapper \(actor.model\)"):
        HFEngine(CONFIG, module=nn.ModuleList([tiny_model()]))


@pytest.mark.gpu
def test_on_a_gpu_weights_move_to_the_host_and_back(tiny_model):
    model = tiny_model()
    config = EngineConfig("hf", "", options={"device": "cuda"})
    engine = HFEngine(config, module=model)
    params = SamplingParams(max_tokens=20, n=4)
    before = engine.generate(prompts(5, 2, 9), params)
    assert largest_error(model, before) < 1e-3
    hashes = engine.hash_parameters()
    engine.sleep(1)
    assert {p.device.type for p in engine.native.parameters()} == {"cpu"}
    engine.wake_up()
    assert {p.device.type for p in engine.native.parameters()} == {"cuda"}
    assert engine.hash_parameters() == hashes
    assert engine.generate(prompts(5, 2, 9), params) == before


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params", "state"])
def test_the_argument_of_the_cache_is_read_off_the_forward_pass(tiny_model, monkeypatch, name):
    """transformers 5.24 renamed it, and takes the older name without listing it."""
    model = tiny_model("qwen3")

    def sampled():
        rows = embedded(model).generate(prompts(4, 2), SamplingParams(max_tokens=5))
        return [row.output_token_ids for row in rows]

    ids = sampled()
    forward, argument = Qwen3ForCausalLM.forward, ModelTraits(model).cache_argument
    parameters = inspect.signature(forward).parameters.values()
    renamed = [each.replace(name=name) if each.name == argument else each for each in parameters]

    def call(self, **inputs):
        inputs = {argument if key == name else key: value for key, value in inputs.items()}
        return forward(self, **inputs)

    call.__signature__ = inspect.Signature(renamed)
    monkeypatch.setattr(Qwen3ForCausalLM, "forward", call)
    # Without one that is known, it computes whole rows.
    assert sampled() == ids


class Products(TorchDispatchMode):
    """Batched products, which a head makes of states that are not in one piece."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize("lengths", [(6, 6, 6), (2, 7, 4)])
def test_all_rows_share_one_product_of_the_output_layer(tiny_model, lengths):
    model = tiny_model("qwen3")
    vocab = model.config.vocab_size
    engine = embedded(model)
    with Products() as found:
        engine.generate(prompts(*lengths), SamplingParams(max_tokens=3))
    assert not [shape for shape in found.shapes if shape[-1] == vocab]
    # Positive control: what torch before 2.14 makes of a slice.
    with Products() as found:
        torch.bmm(torch.ones(3, 1, 4), torch.ones(3, 4, vocab))
    assert found.shapes == [(3, 1, vocab)]
