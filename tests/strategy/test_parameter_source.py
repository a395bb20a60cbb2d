"""What each strategy says about its parameters must describe the full tensors exactly."""

import pytest
import torch
from tests.models.tiny import tiny_model
from tests.strategy.backend_world import OddShapes
from torch import nn

from lightrft.strategy.fsdp2.sharding import chunk_ranges
from lightrft.strategy.weight_sync.parameter_source import (
    SourceParameter,
    checkpoint_module,
    module_parameter_source,
    tied_parameter_names,
)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 7])
def test_chunk_ranges_are_those_of_torch_chunk(num_rows, num_ranks):
    values = torch.arange(num_rows * 6).view(num_rows, 2, 3)
    chunks = list(values.chunk(num_ranks))
    chunks += [values[:0]] * (num_ranks - len(chunks))
    ranges = chunk_ranges((num_rows, 2, 3), num_ranks)
    assert len(ranges) == num_ranks
    for (start, stop), chunk in zip(ranges, chunks, strict=True):
        assert torch.equal(values.view(-1)[start:stop], chunk.reshape(-1))


def test_names_are_those_of_the_checkpoint_for_an_actor_and_for_a_bare_model():
    from lightrft.models import Actor

    model = tiny_model()
    expected = [name for name, _ in model.named_parameters()]
    assert "model.layers.0.self_attn.q_proj.weight" in expected
    bare = [p.checkpoint_name for p in module_parameter_source(model).parameters()]
    wrapped = [p.checkpoint_name for p in module_parameter_source(Actor(model)).parameters()]
    assert bare == expected
    assert wrapped == expected
    assert checkpoint_module(model) is model


def test_a_tied_parameter_is_listed_once_and_its_second_name_is_known():
    model = tiny_model(tie_word_embeddings=True)
    source = module_parameter_source(model)
    names = [parameter.checkpoint_name for parameter in source.parameters()]
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names
    assert source.tied_names == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied_parameter_names(tiny_model()) == {}


def test_whole_parameters_share_the_trainers_storage_and_know_what_is_frozen():
    module = OddShapes()
    for entry, (name, parameter) in zip(
        module_parameter_source(module).parameters(), module.named_parameters(), strict=True
    ):
        assert entry.checkpoint_name == name
        assert entry.frozen == (name == "cube")
        assert entry.local_shard.data_ptr() == parameter.data_ptr()
        assert entry.is_aliasable
        assert entry.shards == ((0, parameter.numel()),)


def test_a_strided_parameter_is_copied_and_never_shared():
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    (entry,) = module_parameter_source(module).parameters()
    assert not entry.is_aliasable
    assert torch.equal(entry.local_shard.view(3, 2), module.weight)


def test_a_shard_of_the_wrong_size_is_refused_by_name():
    with pytest.raises(ValueError, match="'w' must be 1-D with one of the sizes"):
        SourceParameter("w", (4,), ((0, 2), (2, 4)), torch.zeros(3), frozen=False)
