"""Adam's states of a sharded layer on a fake H100, moved to the host and back; see `fake_cuda.py`.

Prints where they were, and how the host's memory was asked for.
"""

import json

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.strategy.fsdp2.strategy import move_states


class Copies(TorchDispatchMode):
    """Operators that copy or allocate, with what says whether the host waits."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name == "empty_like":
            self.seen.append([name, bool(kwargs.get("pin_memory"))])
        if name in ("copy_", "_to_copy"):
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self.seen.append([name, bool(non_blocking)])
        return function(*args, **kwargs)


def main():
    torch.cuda.init()
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cuda", (8,))
    found = {}
    with FakeTensorMode():
        layer = torch.nn.Linear(64, 64, device="cuda")
        fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        layer(torch.empty(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        for device in ("cpu", "cuda"):
            with Copies() as copies:
                move_states(optimizer, torch.device(device))
            states = [v for s in optimizer.state.values() for v in s.values() if v.dim() > 0]
            devices = sorted({state.to_local().device.type for state in states})
            found[device] = {"devices": devices, "operators": copies.seen}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
