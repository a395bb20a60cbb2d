"""AdamW with moments of 8 bits beside a slow one in float64."""

import pytest
import torch
from tests.ranks import run_multiprocess
from tests.strategy.backend_world import make, prepared
from torch import nn

from lightrft.engines.nf4 import table_8bit
from lightrft.strategy.adam_8bit import BLOCK_SIZE, MIN_8BIT_SIZE, Adam8bit
from lightrft.strategy.optimizers import AdamSettings

pytest.importorskip("bitsandbytes", reason="8-bit Adam needs bitsandbytes")
TABLES = [table_8bit(torch.device("cpu"), signed=signed) for signed in (True, False)]
SETTINGS = AdamSettings(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def decoded(codes, scales, numbers):
    """Moments in float64: the number of each code times the scale of its block."""
    blocks = torch.arange(codes.numel()) // BLOCK_SIZE
    values = numbers.double()[codes.flatten().long()] * scales.double()[blocks]
    return values.view(codes.shape)


def moments(optimizer, parameter):
    state = optimizer.state[parameter]
    both = zip(("exp_avg", "exp_avg_sq"), TABLES, strict=True)
    return [decoded(state[name], state[f"{name}_scale"], numbers) for name, numbers in both]


def trained(shape, num_steps, seed=0):
    """Parameter and optimizer; before each step its decoded moments, weights and gradient."""
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = Adam8bit([{"params": [parameter], "weight_decay": 0.1}], SETTINGS)
    before = []
    for _ in range(num_steps):
        size = 0.1 + torch.rand(1, generator=generator)
        parameter.grad = torch.randn(shape, generator=generator) * size
        held = moments(optimizer, parameter) if optimizer.state[parameter] else [0.0, 0.0]
        before.append((held, parameter.detach().double(), parameter.grad.double()))
        optimizer.step()
    return parameter, optimizer, before


def adam(first, second, weights, gradient, step):
    """One step in float64."""
    beta1, beta2 = SETTINGS.betas
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    denominator = (second / (1 - beta2**step)).sqrt() + SETTINGS.eps
    weights = weights * (1 - SETTINGS.lr * SETTINGS.weight_decay)
    return first, second, weights - SETTINGS.lr * first / (1 - beta1**step) / denominator


@pytest.mark.parametrize("shape", [(64, 100), (71, 83)])
def test_a_step_is_adams_on_the_decoded_moments_which_are_rounded_once(shape):
    for num_steps in (1, 2, 7):
        parameter, optimizer, before = trained(shape, num_steps)
        held, weights, gradient = before[-1]
        *exact, expected = adam(*held, weights, gradient, num_steps)
        torch.testing.assert_close(parameter.double(), expected, rtol=0, atol=1e-6)
        for own, value, numbers in zip(moments(optimizer, parameter), exact, TABLES, strict=True):
            # The widest gap between two numbers: of its two neighbours one is taken.
            gap = numbers.double().sort().values.diff().max()
            pad = -value.numel() % BLOCK_SIZE
            error, largest = (
                nn.functional.pad(each.abs().flatten(), (0, pad)).view(-1, BLOCK_SIZE).amax(1)
                for each in (own - value, value)
            )
            assert (error <= gap * largest).all()
            # A tenth of that is exceeded.
            assert (error > gap * largest / 10).any()


def test_it_keeps_two_bytes_a_number_and_small_tensors_in_float32():
    parameter, optimizer, _ = trained((64, 128), 1)
    num_bytes = sum(value.nbytes for value in optimizer.state[parameter].values())
    assert num_bytes == 2 * parameter.numel() + 2 * 4 * parameter.numel() // BLOCK_SIZE + 4
    small = nn.Parameter(torch.ones(MIN_8BIT_SIZE - 1))
    slow = nn.Parameter(small.detach().clone())
    optimizer = Adam8bit([{"params": [small], "weight_decay": 0.1}], SETTINGS)
    other = torch.optim.AdamW([slow], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(3):
        small.grad = slow.grad = torch.randn_like(small)
        optimizer.step()
        other.step()
    torch.testing.assert_close(small, slow)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))

    def forward(self, inputs):
        return self.layers(inputs)


def steps(strategy, ready, numbers):
    for number in numbers:
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
        loss = ready.model(inputs).square().mean()
        strategy.backward(loss, ready, ready.optimizer)
        strategy.optimizer_step(ready.optimizer, ready, ready.scheduler, name="actor")
    return [strategy.backend.local_part(p).clone() for p in ready.model.parameters()]


def made(strategy):
    strategy.setup_distributed()
    ready = prepared(strategy, Model())
    assert isinstance(ready.optimizer, Adam8bit)
    return ready


def resumes(rank, world_size, folder, is_fsdp):
    """Four steps, and two, a checkpoint and two, in bits."""
    backend = "fsdp2" if is_fsdp else "fake"
    with make(backend, adam_8bit=True, train_batch_size=1, fsdp=True) as strategy:
        whole = steps(strategy, made(strategy), range(4))
        ready = made(strategy)
        steps(strategy, ready, range(2))
        strategy.save_ckpt(ready.model, folder, tag="two", client_state={})
        again = made(strategy)
        strategy.load_ckpt(again.model, folder, tag="two")
        assert all(map(torch.equal, whole, steps(strategy, again, range(2, 4))))


def test_a_checkpoint_goes_on_in_bits(tmp_path):
    resumes(0, 1, str(tmp_path), is_fsdp=False)


@pytest.mark.full
def test_a_checkpoint_of_fsdp2_goes_on_in_bits(tmp_path):
    run_multiprocess(resumes, 1, args=(str(tmp_path), True))
