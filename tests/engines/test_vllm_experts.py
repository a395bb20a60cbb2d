"""A mixture-of-experts model in the real vLLM: loaded from split files, updated as stacks."""

import pytest
import torch
from tests.engines.plain_forward import largest_error, random_prompts, send
from tests.models.batches import perturb
from tests.models.tiny import SPECIAL, tiny_model

from lightrft.engines import EngineConfig, SamplingParams, WeightPiece, build_engine
from lightrft.engines.model_shape import ModelShape
from lightrft.engines.vllm import experts, weights
from lightrft.engines.vllm.layout import LayoutReader
from lightrft.kernels import hash_tensor

pytestmark = pytest.mark.vllm


def moe_model():
    return (
        tiny_model(
            "qwen3_moe",
            vocab_size=97,
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            **SPECIAL,
        )
        .float()
        .eval()
    )


def start(folder, model):
    model.save_pretrained(folder)
    return build_engine(
        EngineConfig("vllm", str(folder), max_model_len=128, options={"block_size": 32})
    )


def logprob_error(engine, model):
    """Largest difference between the engine's logprobs and those of a plain forward."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    return largest_error(model, engine.generate(random_prompts(6, 9), params))


def test_an_update_reaches_the_experts_that_vllm_computes_with(tmp_path, monkeypatch):
    model = moe_model()
    engine = start(tmp_path, model)
    try:
        assert logprob_error(engine, model) < 1e-5
        check_accounting(engine, model)
        for seed in (1, 2):
            perturb(model, seed)
            assert logprob_error(engine, model) > 1e-2
            send(engine, model)
            assert logprob_error(engine, model) < 1e-5
        # Positive control: what vLLM itself does after a reload is not enough on a CPU.
        monkeypatch.setattr(weights, "repack_on_cpu", lambda modules, names: None)
        send(engine, model)
        assert logprob_error(engine, model) > 1e-2
    finally:
        engine.close()


def check_accounting(engine, model):
    """Every parameter of the trainer is in the manifest, and every one of vLLM is filled."""
    manifest = {parameter.name: parameter for parameter in engine.parameter_manifest()}
    assert set(manifest) == {name for name, _ in model.named_parameters()}
    reader = reader_of(engine, {n: tuple(p.shape) for n, p in model.named_parameters()})
    filled = {".".join(reader.target_of(name)) for name in manifest}
    assert filled == {name for name, _ in engine.started.model.named_parameters()}
    stacks = [p for p in manifest.values() if ".experts." in p.name]
    assert len(stacks) == 4
    for stack in stacks:
        partner, pair = stack.fused_with, {"gate_up_proj": "down_proj", "down_proj": "gate_up_proj"}
        layer, _, part = stack.name.rpartition(".")
        assert partner == (f"{layer}.{pair[part]}",)


def reader_of(engine, shapes):
    return LayoutReader(
        engine.started.model,
        ModelShape(shapes, {}),
        tp_rank=0,
        tp_size=1,
        default_dtype=torch.float32,
    )


def plain_experts(monkeypatch):
    """The CPU computes with stacks as they are loaded, as Triton does on a GPU."""
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe
    import vllm.model_executor.layers.utils as utils

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *_, **__):
        found = torch.zeros_like(hidden_states)
        for place in range(topk_ids.shape[1]):
            for row, expert in enumerate(topk_ids[:, place].tolist()):
                gate, up = (w1[expert] @ hidden_states[row]).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                found[row] += topk_weights[row, place] * (w2[expert] @ inner)
        output.copy_(found)

    def keep_linear(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(cpu_moe, "cpu_prepack_moe_weight", lambda weight, isa: weight)
    monkeypatch.setattr(cpu_moe.CPUUnquantizedExperts, "apply", apply)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_linear)
    monkeypatch.setattr("lightrft.engines.vllm.layout.PLAIN_BACKENDS", {experts.PACKED_ON_CPU})


def test_experts_are_hashed_in_the_storage_that_vllm_computes_with(tmp_path, monkeypatch):
    plain_experts(monkeypatch)
    model = moe_model()
    engine = start(tmp_path, model)
    try:
        assert all(parameter.verifiable for parameter in engine.parameter_manifest())
        for seed in (None, 3):
            if seed is not None:
                perturb(model, seed)
                send(engine, model)
            assert logprob_error(engine, model) < 1e-5
            found = engine.hash_parameters(None)
            assert found == {n: hash_tensor(p.detach()) for n, p in model.named_parameters()}
        check_split_names(engine, model)
        # Positive control: two experts exchanged.
        name = "model.layers.1.mlp.experts"
        stack = dict(engine.started.model.named_modules())[f"{name}.routed_experts"].w2_weight
        with torch.no_grad():
            stack.copy_(stack[[1, 0, 2, 3]])
        again = engine.hash_parameters(None)
        assert [n for n in found if found[n] != again[n]] == [f"{name}.down_proj"]
    finally:
        engine.close()


def check_split_names(engine, model):
    """The same stacks by the names of checkpoints on disk: read back, and written."""
    tensors = {}
    for name, parameter in model.named_parameters():
        layer, found, part = name.partition(".experts.")
        if not found:
            tensors[name] = parameter.detach()
            continue
        for expert, rows in enumerate(parameter.detach()):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for each, values in zip(names, rows.chunk(len(names)), strict=True):
                tensors[f"{layer}.experts.{expert}.{each}.weight"] = values.contiguous()
    reader = reader_of(engine, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    split = weights.VLLMWeights(engine.started, reader.read(), "vllm")
    assert split.hashes(None) == {name: hash_tensor(tensor) for name, tensor in tensors.items()}
    split.begin()
    doubled = {name: 2 * tensor for name, tensor in tensors.items()}
    for name, tensor in doubled.items():
        split.load([WeightPiece(name, tuple(tensor.shape), 0, tensor.reshape(-1))])
    split.finish()
    assert split.hashes(None) == {name: hash_tensor(tensor) for name, tensor in doubled.items()}
    send(engine, model)
