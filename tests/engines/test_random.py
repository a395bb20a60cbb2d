import torch

from lightrft.engines.sampling import mix64, row_keys, uniforms

CPU = torch.device("cpu")
MASK = 2**64 - 1


def slow_mix64(x):
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_mix64_is_splitmix64():
    # The first output of splitmix64 seeded with 0, as its reference code prints it.
    assert int(mix64(torch.tensor([0]))) & MASK == 0xE220A8397B1DCDAF
    values = [0, 1, -1, 2**63 - 1, -(2**63), 123456789, -987654321]
    mixed = mix64(torch.tensor(values))
    assert [v & MASK for v in mixed.tolist()] == [slow_mix64(v & MASK) for v in values]


def test_uniforms_come_from_seed_request_sample_and_position():
    keys = row_keys(5, [7, 2**63 + 1], [0, 3], device=CPU)
    numbers = uniforms(keys, 10, 13)
    for row, (request, sample) in enumerate([(7, 0), (2**63 + 1, 3)]):
        key = slow_mix64(slow_mix64(slow_mix64(5) ^ request) ^ sample)
        for column, position in enumerate((10, 11, 12)):
            bits = slow_mix64(key ^ slow_mix64(position))
            assert numbers[column, row].item() == (bits >> 12) / 2**52


def test_a_block_of_positions_equals_single_positions():
    keys = row_keys(0, [1, 2, 3], [0, 0, 1], device=CPU)
    block = uniforms(keys, 0, 50)
    assert torch.equal(block, torch.cat([uniforms(keys, i, i + 1) for i in range(50)]))
    assert torch.equal(block[:, 1:2], uniforms(keys[1:2], 0, 50))


def test_uniforms_are_uniform_and_uncorrelated():
    keys = row_keys(0, range(500), [0] * 500, device=CPU)
    numbers = uniforms(keys, 0, 200)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = torch.histc(numbers, bins=20, min=0, max=1) / numbers.numel()
    assert (shares - 0.05).abs().max() < 5 * (0.05 / numbers.numel()) ** 0.5
    centred = numbers - 0.5
    for neighbour in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert neighbour.mean().abs() < 5 / 12 / neighbour.numel() ** 0.5
    assert len(set(numbers.flatten().tolist())) == numbers.numel()
