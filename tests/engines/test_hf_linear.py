import pytest
import torch
from torch import nn

from lightrft.engines import EngineConfig
from lightrft.engines.hf import engine as module
from lightrft.engines.hf.engine import FewRowsLinear, HFEngine, use_few_rows_products


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(module, "MIN_WEIGHT", 1)


def layers(*, bias):
    """A plain layer and one of the engine's with the same weights."""
    torch.manual_seed(0)
    plain = nn.Linear(96, 160, bias=bias)
    engine = nn.Linear(96, 160, bias=bias)
    engine.load_state_dict(plain.state_dict())
    holder = nn.Sequential(engine)
    use_few_rows_products(holder)
    assert isinstance(holder[0], FewRowsLinear)
    return plain, holder[0]


def error(outputs, inputs, layer):
    """Largest difference from the layer's definition in float64."""
    exact = inputs.double() @ layer.weight.double().T
    if layer.bias is not None:
        exact = exact + layer.bias.double()
    assert outputs.shape == exact.shape
    return (outputs.double() - exact).abs().max().item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 11, 12, 33, 64, 65])
def test_the_product_is_that_of_the_definition(rows, bias):
    plain, layer = layers(bias=bias)
    # The last position of several: rows that do not lie side by side.
    inputs = torch.randn(rows, 3, 96)[:, -1:]
    with torch.inference_mode():
        outputs = layer(inputs)
        assert outputs.is_contiguous()
        assert error(outputs, inputs, plain) <= 2 * error(plain(inputs), inputs, plain) + 1e-7


def test_a_weight_that_is_replaced_is_the_one_used():
    plain, layer = layers(bias=False)
    inputs = torch.randn(16, 96)
    plain.weight.data = torch.randn(161, 96)  # of a resized head
    layer.weight.data = plain.weight.data
    with torch.inference_mode():
        assert error(layer(inputs), inputs, plain) < 1e-4


@pytest.mark.parametrize("dtype, expected", [("float32", True), ("bfloat16", False)])
def test_only_float32_layers_are_changed(tiny_model, dtype, expected):
    source = tiny_model()
    engine = HFEngine(EngineConfig("hf", "", dtype=dtype), module=source)
    kinds = {type(m) for m in engine.native.modules() if isinstance(m, nn.Linear)}
    assert kinds == {FewRowsLinear if expected else nn.Linear}
    assert {type(m) for m in source.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


def test_a_small_weight_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(module, "MIN_WEIGHT", 97 * 160)
    model = nn.Sequential(nn.Linear(96, 160), nn.Linear(97, 160))
    use_few_rows_products(model)
    assert [type(layer) for layer in model] == [nn.Linear, FewRowsLinear]
