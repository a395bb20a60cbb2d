"""Memory per rank of what strategies share out, offload or store in fewer bits.

pytest benchmarks/test_bench_memory.py -s

Up to four processes with gloo train one model; every table is bytes per parameter and rank. The
storages of all live tensors of a process are counted. On a CPU the device *is* host memory: what a
strategy keeps on the host by construction is taken off, and the rest is what a device would hold.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_multiprocess
from torch import nn
from torch.distributed.tensor import DTensor

VOCAB = 8_000
SETTINGS = {"bf16": False, "engine_type": "hf", "timeout_minutes": 10.0, "lr_warmup_ratio": 0.0}
CELLS = {
    1: {"one process": {"fake": True}},
    2: {
        "FSDP2": {"fsdp": True},
        "FSDP2, bf16": {"fsdp": True, "bf16": True},
        "FSDP2, bf16, use_mp_opt": {"fsdp": True, "bf16": True, "use_mp_opt": True},
        "FSDP2, bf16, adam_offload": {"fsdp": True, "bf16": True, "adam_offload": True},
        "  and use_mp_opt": {"fsdp": True, "bf16": True, "adam_offload": True, "use_mp_opt": True},
        "FSDP2, adam_offload": {"fsdp": True, "adam_offload": True},
        "FSDP2, fsdp_cpu_offload": {"fsdp": True, "fsdp_cpu_offload": True},
        "ZeRO-1": {"zero_stage": 1},
        "ZeRO-2": {"zero_stage": 2},
        "ZeRO-2, adam_offload": {"zero_stage": 2, "adam_offload": True},
        "ZeRO-3": {"zero_stage": 3},
    },
    4: {"FSDP2": {"fsdp": True}, "HSDP, shard_size 2": {"fsdp": True, "shard_size": 2}},
}


def config_of(*, hidden, layers, vocab):
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )


class Scorer(nn.Module):
    """Enters a language model by one forward, like an actor."""

    is_actor = True

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, token_ids):
        return self.model(input_ids=token_ids, use_cache=False).logits.float().logsumexp(-1).mean()


def local_part(tensor):
    """What this process holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def live_storages():
    """Address -> bytes of the storages of all live tensors."""
    gc.collect()
    kinds = (torch.Tensor, nn.Parameter, DTensor)
    tensors = [item for item in gc.get_objects() if type(item) in kinds]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    found = {}
    for tensor in map(local_part, tensors):
        if tensor.is_meta:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() > 0:
            found[storage.data_ptr()] = storage.nbytes()
    return found


def host_storages(strategy, model, optimizer):
    """Addresses that the strategy keeps in host memory by construction."""
    tensors = []
    config = strategy.config
    if config.fsdp_cpu_offload:
        tensors += [
            *model.parameters(),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]
    if config.adam_offload or config.fsdp_cpu_offload:
        tensors += [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    if config.adam_offload and not config.fsdp:
        tensors += [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [p.grad for p in tensors if p.is_leaf and p.grad is not None]
    return {tensor.untyped_storage().data_ptr() for tensor in map(local_part, tensors)}


def make(options):
    values = {**SETTINGS, **options}
    shard_size = values.pop("shard_size", -1)
    if values.pop("fake", False):
        from lightrft.strategy.fake import FakeStrategy

        return FakeStrategy(1, 1.0, 1, 1, args=values), shard_size
    from lightrft.strategy import get_strategy

    sizes = {"micro_train_batch_size": 1, "train_batch_size": int(os.environ["WORLD_SIZE"])}
    return get_strategy({**values, **sizes}), shard_size


def measure(options):
    """{moment: bytes of tensors, and those of them that are on the host by construction}."""
    strategy, shard_size = make(options)
    with strategy:
        before = live_storages()
        from transformers import Qwen3ForCausalLM

        torch.manual_seed(0)
        model = Scorer(Qwen3ForCausalLM(config_of(hidden=256, layers=6, vocab=VOCAB)))
        numel = sum(p.numel() for p in model.parameters())
        if strategy.backend.wraps_before_optimizer:
            model = strategy.prepare_model(model, is_training=True, shard_size=shard_size)
            optimizer = strategy.create_optimizer(model, lr=1e-4)
        else:
            optimizer = strategy.create_optimizer(model, lr=1e-4)
            model, optimizer = strategy.prepare((model, optimizer))
        token_ids = torch.randint(0, VOCAB, (1, 16))
        found = {}

        def note(moment):
            held = {a: n for a, n in live_storages().items() if a not in before}
            on_host = host_storages(strategy, model, optimizer)
            found[moment] = (
                sum(held.values()) / numel,
                sum(n for a, n in held.items() if a in on_host) / numel,
            )

        for is_last in (False, True):
            with strategy.accumulation(1, optimizer):
                strategy.backward(model(token_ids), model, optimizer)
                if is_last:
                    note("after backward")
                strategy.optimizer_step(optimizer, model, None)
        strategy.maybe_offload_optimizer(optimizer)
        note("between updates")
    return found


def measure_cells(rank, world_size, cells):
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    return {name: measure(options) for name, options in cells.items()}


@pytest.mark.parametrize("world_size", list(CELLS))
def test_training(benchmark, world_size):
    ranks = benchmark.pedantic(
        lambda: run_multiprocess(
            measure_cells, world_size, timeout_seconds=1200, args=(CELLS[world_size],)
        ),
        rounds=1,
    )
    print(f"\n{world_size} processes: bytes per parameter on the fullest rank")
    print(f"  {'':26} {'after backward':>24} {'between updates':>24}")
    print(f"  {'':26} {'all':>12}{'on device':>12} {'all':>12}{'on device':>12}")
    table = {}
    for name in CELLS[world_size]:
        cell = {}
        for moment in ("after backward", "between updates"):
            every = [results[name][moment] for results in ranks]
            cell[moment] = {
                "all": max(total for total, _ in every),
                "on_device": max(total - host for total, host in every),
            }
        table[name] = cell
        numbers = " ".join(f"{c['all']:12.2f}{c['on_device']:12.2f}" for c in cell.values())
        print(f"  {name:26} {numbers}")
    benchmark.extra_info.update(
        title=f"bytes per parameter and rank, {world_size} processes", table=table
    )


# ------------------------------------------------------------------ loading


class PeakOfProcess:
    """Largest resident memory of this process inside, above that at the start; Linux only."""

    def __enter__(self):
        self.start = self.largest = _resident_bytes()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._is_done.wait(0.001):
            self.largest = max(self.largest, _resident_bytes())

    def __exit__(self, *exception):
        self._is_done.set()
        self._thread.join()

    @property
    def bytes(self):
        return self.largest - self.start


def _resident_bytes():
    """Mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def load_model(rank, world_size, path, meta_init):
    """(peak bytes while building and sharding, bytes of this rank's shards, seconds)."""
    from transformers import Qwen3ForCausalLM

    from lightrft.models import Actor

    strategy, _ = make({"fsdp": True})
    with strategy:
        # What torch imports and allocates at the first use is not the model's.
        warm = strategy.prepare_model(
            Scorer(Qwen3ForCausalLM(config_of(hidden=64, layers=1, vocab=64))), is_training=True
        )
        warm(torch.zeros(1, 4, dtype=torch.long))
        Actor.from_pretrained(os.path.join(path, "small"))
        del warm
        gc.collect()
        strategy.barrier()
        begin = time.perf_counter()
        with PeakOfProcess() as peak:
            with strategy.init_model_context(meta_init):
                actor = Actor.from_pretrained(path)
            actor = strategy.prepare_model(actor, is_training=True)
        seconds = time.perf_counter() - begin
        shard = sum(p.to_local().numel() * 4 for p in actor.parameters())
        checksum = sum(float(p.detach().full_tensor().double().sum()) for p in actor.parameters())
    return peak.bytes, shard, seconds, checksum


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    from transformers import Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    for folder, sizes in (
        (path, {"hidden": 1024, "layers": 4, "vocab": 16_000}),
        (path / "small", {"hidden": 64, "layers": 1, "vocab": 64}),
    ):
        Qwen3ForCausalLM(config_of(**sizes)).bfloat16().save_pretrained(folder)
    return str(path)


def test_loading(benchmark, large_model):
    found = {}
    for name, meta_init in (("whole on every rank", False), ("meta_init", True)):
        ranks = run_multiprocess(load_model, 2, timeout_seconds=1200, args=(large_model, meta_init))
        found[name] = {
            "peak_mb": max(peak for peak, *_ in ranks) / 1e6,
            "shard_mb": max(shard for _, shard, *_ in ranks) / 1e6,
            "peak_over_shard": max(peak / shard for peak, shard, *_ in ranks),
            "seconds": max(seconds for _, _, seconds, _ in ranks),
            "checksum": ranks[0][3],
        }
    print("\n71 million weights, bfloat16 file to float32 on 2 FSDP2 ranks: peak resident memory")
    for name, cell in found.items():
        print(
            f"  {name:20} {cell['peak_mb']:8.0f} MB for a shard of {cell['shard_mb']:.0f} MB: "
            f"{cell['peak_over_shard']:.2f} times, {cell['seconds']:.1f} s"
        )
    # The same weights arrived; and the promise of the strategy.
    assert found["meta_init"]["checksum"] == found["whole on every rank"]["checksum"]
    assert found["meta_init"]["peak_over_shard"] < 1.3
    benchmark.extra_info.update(title="peak host memory while loading", table=found)
    benchmark.pedantic(lambda: None, rounds=1)
