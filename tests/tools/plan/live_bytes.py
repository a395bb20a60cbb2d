"""Bytes of all live tensors, followed through every operation of torch."""

import gc
import weakref
from collections import Counter

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts the storages of one device, those that exist already and those that appear inside.

    Operators of ours are opaque: what they allocate and free inside is not seen.

    Args:
        device: "cpu", or "cuda" for fake tensors.
        counts_existing: Count tensors that exist already; what earlier tests have left may be freed
            at any time.
    """

    def __init__(self, device="cpu", *, counts_existing=True):
        super().__init__()
        self.device = device
        self.foreign = set()  # operators that gave a tensor of another device
        self.total = self.peak = 0
        self.largest = {}  # sizes at the peak
        self._sizes = {}
        self._seen = WeakIdKeyDictionary()
        self._resize = torch.UntypedStorage.resize_
        for item in gc.get_objects() if counts_existing else ():
            if issubclass(type(item), torch.Tensor):
                self.add(item)

    def __enter__(self):
        resize = self._resize

        def counting(storage, size):
            done = resize(storage, size)
            if storage in self._seen:
                self._change(self._seen[storage], size)
            return done

        torch.UntypedStorage.resize_ = counting
        self.begin()
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def begin(self):
        """Forgets the peak."""
        self.peak = self.total

    def add(self, tensor):
        """Counts a tensor's storage until it is freed."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self.device or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        # What a trace of another test left with symbolic sizes holds nothing.
        if storage in self._seen or not isinstance(storage.nbytes(), int):
            return
        key = id(storage)
        self._seen[storage] = key
        self._change(key, storage.nbytes())
        weakref.finalize(storage, self._change, key, 0)

    def _change(self, key, size):
        self.total += size - self._sizes.pop(key, 0)
        if size:
            self._sizes[key] = size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if function.namespace == "prim":
            return output
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
                if tensor.device.type != self.device and tensor.dim() > 0:
                    self.foreign.add(str(function))
        if self.total > self.peak:
            self.peak = self.total
            self.largest = Counter(self._sizes.values())
        return output
