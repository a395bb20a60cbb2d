"""Linear layers over few rows, as decoding has them, on a CPU."""

import torch
from torch import nn

# Where the product with the weight on the left was the faster one; with fewer rows reading the
# weight decides, with more the arithmetic.
_MIN_ROWS = 12
_MAX_ROWS = 64


class FewRowsLinear(nn.Linear):
    """An `nn.Linear` that multiplies weight by rows instead of rows by weight where rows are few.

    The BLAS that torch ships reads a large weight up to twice as fast as the left factor. The
    results are those of `nn.Linear` but for the order of sums.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps [..., in_features] to [..., out_features]."""
        rows = input.numel() // self.in_features
        if not _MIN_ROWS <= rows <= _MAX_ROWS:
            return super().forward(input)
        columns = torch.mm(self.weight, input.reshape(rows, self.in_features).t())
        output = columns.t().contiguous().view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def use_few_rows_products(model: nn.Module) -> None:
    """Makes the float32 linear layers that a model has on the CPU `FewRowsLinear`s, in place."""
    for module in model.modules():
        # A subclass has a forward of its own.
        if type(module) is not nn.Linear:
            continue
        if module.weight.device.type == "cpu" and module.weight.dtype == torch.float32:
            module.__class__ = FewRowsLinear
