"""Counts of how often the host would wait for a device, found on a processor."""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Values on the host, and sizes that depend on values.
WAITS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::_unique2",
}
# These copy a tensor to the host, which on a processor is no operation.
METHODS = ("cpu", "numpy", "tolist")


class HostWaits(TorchDispatchMode):
    """Names of the operations that wait, in order.

    On the way to numbers on the host: indexing by a mask waits as `nonzero` does.
    """

    def __init__(self):
        super().__init__()
        self.names = []
        self._patches = []

    def __enter__(self):
        for name in METHODS:
            original = getattr(torch.Tensor, name)

            def counted(tensor, *args, _name=name, _original=original, **options):
                self.names.append(_name)
                return _original(tensor, *args, **options)

            self._patches.append(mock.patch.object(torch.Tensor, name, counted))
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self._patches:
            patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        indices = args[1] if name.startswith("aten::index") and len(args) > 1 else ()
        masks = indices if isinstance(indices, list | tuple) else ()
        if name in WAITS or any(m is not None and m.dtype == torch.bool for m in masks):
            self.names.append(name)
        return function(*args, **(kwargs or {}))
