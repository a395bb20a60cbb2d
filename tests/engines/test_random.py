import torch
from tests.kernels.test_operations import MASK, mix64 as slow_mix64

from lightrft.engines.sampling import mix64, row_keys, uniforms

CPU = torch.device("cpu")


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
