"""Models that are built without memory and read by shards equal those that were read whole."""

import hashlib
from typing import ClassVar

import pytest
import torch
from tests.models.test_proof import LATENT
from tests.models.tiny import tiny_model
from tests.models.vision.tiny_families import write_tiny_vision_model
from tests.models.vision.tiny_world import Batch, scored
from tests.ranks import run_multiprocess
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrft.config import TrainConfig
from lightrft.engines.media.encoder import PromptEncoder
from lightrft.engines.media.families import family_of
from lightrft.models.loading import load_processor
from lightrft.stages.models import load_policy

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TEXT = {
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "untied": ("qwen3", {}),
    "experts": ("qwen3_moe", EXPERTS),
    # Its routers have a buffer that the files hold.
    "bias of routers": ("deepseek_v3", {**LATENT, "num_experts_per_tok": 2}),
}
VISION = ("tiny-qwen2-vl", "tiny-gemma3", "tiny-qwen3-vl-moe")
ADAPTED = ("tied", "experts", "tiny-qwen2-vl")
# Names of layers of text, and a pattern for those of towers.
LAYERS = ("o_proj", r"(?!.*layers\.\d+\.mlp).*")
LORA = {"lora_rank": 4, "lora_alpha": 8.0, "target_modules": LAYERS, "seed": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, (family, changes) in TEXT.items():
        model = tiny_model(family, **changes)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.arange(len(buffer)))
        model.save_pretrained(root / name)
    for name in VISION:
        write_tiny_vision_model(root / name, name, seed=1)
    return {name: str(root / name) for name in (*TEXT, *VISION)}


def read(strategy, path, options, meta_init):
    """A policy that is ready to train, as the stages build it."""
    config = TrainConfig(pretrain=path, **options)
    with strategy.init_model_context(meta_init):
        actor = load_policy(path, config)
    on_meta = {n for n, p in actor.named_parameters() if p.is_meta}
    assert any(on_meta) is meta_init
    assert not any("lora_" in name for name in on_meta)
    return strategy.prepare_model(actor, is_training=True)


def hashes(actor):
    """Of all parameters and buffers, whole."""
    values = [*actor.named_parameters(), *actor.named_buffers()]
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values
    }
    return {
        name: (str(value.dtype), hashlib.sha256(value.detach().numpy().tobytes()).hexdigest())
        for name, value in full.items()
    }


def logprobs(actor, path):
    if "tiny" in path:
        encoder = PromptEncoder(load_processor(path), family_of(actor.pretrained.config))
        return scored(actor, Batch(actor.pretrained, encoder))
    ids = torch.arange(2, 34).view(2, 16)
    return actor(ids, torch.ones_like(ids, dtype=torch.bool)).logprobs


def sharding(world_size):
    from lightrft.strategy.fsdp2.strategy import FSDPV2Strategy

    settings = {"bf16": False, "timeout_minutes": 2.0}
    return FSDPV2Strategy(1, 1.0, 1, world_size, args=settings)


def compare(rank, world_size, folders):
    """Hashes of every model, once both ways to read it gave the same."""
    sizes = {}
    with sharding(world_size) as strategy:
        for name, path in folders.items():
            options = LORA if name in ADAPTED else {}
            whole, shards = (read(strategy, path, options, meta) for meta in (False, True))
            expected = hashes(whole)
            assert hashes(shards) == expected, name
            with torch.no_grad():
                pair = [logprobs(actor, path) for actor in (whole, shards)]
            assert torch.equal(*pair), name
            assert pair[0].any(), name
            saved = [actor.pretrained._weight_conversions for actor in (whole, shards)]
            assert str(saved[0]) == str(saved[1]), name
            assert shards.pretrained.config.to_dict() == whole.pretrained.config.to_dict()
            sizes[name] = expected
    return sizes


@pytest.mark.full
def test_shards_that_were_read_are_the_whole_model_on_any_number_of_ranks(folders):
    one, two = (
        run_multiprocess(compare, size, args=(folders,), timeout_seconds=240)[0] for size in (1, 2)
    )
    assert one == two
    assert one.keys() == folders.keys()


class HostMemory(TorchDispatchMode):
    """Counter of the bytes of tensors on the host, those included that came from a file."""

    held: ClassVar[dict[int, tuple[StorageWeakRef, int]]]

    def __init__(self):
        super().__init__()
        self.held, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu":
                storage = StorageWeakRef(value.untyped_storage())
                self.held[storage.cdata] = storage, value.untyped_storage().nbytes()
        self.held = {key: each for key, each in self.held.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return result


def measure(rank, world_size, folders):
    """Peaks of the host's memory by model and way to read, with the sizes of parts."""
    found = []
    with sharding(world_size) as strategy:
        for path in folders:
            for options in ({}, LORA):
                peaks = []
                for meta_init in (False, True):
                    with HostMemory() as memory:
                        actor = read(strategy, path, options, meta_init)
                    peaks.append(memory.peak)
                sizes = {name: 4 * value.numel() for name, value in actor.named_parameters()}
                adapters = sum(size for name, size in sizes.items() if "lora_" in name)
                shards = sum(4 * p.to_local().numel() for p in actor.parameters())
                buffers = sum(b.nbytes for b in actor.buffers())
                bound = shards + adapters + buffers + 2 * max(sizes.values())
                found.append((path, peaks, bound, sum(sizes.values())))
    return found


@pytest.mark.full
def test_a_rank_holds_its_shards_and_a_tensor_beside_them(folders):
    paths = [folders[name] for name in ("untied", "experts", "tiny-qwen2-vl")]
    for found in run_multiprocess(measure, 2, args=(paths,), timeout_seconds=240):
        for path, (whole, shards), bound, total in found:
            assert shards <= bound < total <= whole, path
