"""Training with fully sharded data parallelism on DTensors."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrft.config import BackendOptions
from lightrft.strategy.backend import (
    AnyModel,
    Arguments,
    Backend,
    PreparedModel,
    inner_module,
    wrapped_module,
)
from lightrft.strategy.checkpoints import training_state
from lightrft.strategy.distributed.context import DistributedContext
from lightrft.strategy.distributed.deadlines import phase
from lightrft.strategy.distributed.process_groups import resolve_shard_size
from lightrft.strategy.distributed.sequence_parallel import share_sequences
from lightrft.strategy.fsdp2.sharding import (
    ShardingPlan,
    accumulate_in_float32,
    as_fsdp,
    fsdp2_parameter_source,
    gradient_norm,
    is_empty_everywhere,
    meta_parameters,
    pretrained_directory,
    shard_empty_module,
    shard_module,
)
from lightrft.strategy.optimizers import (
    AdamSettings,
    MasterWeightsAdamW,
    optimizer_parameters,
)
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.weight_sync.parameter_source import ParameterSource, reshard_modules

# Without it (torch before 2.12) replicas exchange gradients after every micro-batch.
CAN_FORGET = hasattr(FSDPModule, "reset_iter_state")


class FSDP2Backend(Backend):
    """Parameters, gradients and optimizer states are sharded over ranks as DTensors."""

    name = "FSDPV2"
    wraps_before_optimizer = True
    builds_on_meta = True

    def __init__(self, context: DistributedContext, config: BackendOptions) -> None:
        super().__init__(context, config)
        self.uses_master_weights = False
        self._meshes: dict[int, DeviceMesh] = {}
        self._offloaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # Models whose replicas have not exchanged the gradients of this step yet.
        self._unfinished: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def start(self) -> None:
        """Decide whether master weights are kept."""
        self.uses_master_weights = self.config.use_mp_opt and self.context.computes_in_bf16
        if self.config.use_mp_opt and not self.uses_master_weights:
            self.context.print("warning: option without effect: use_mp_opt acts only with bf16")

    def _mesh(self, shard_size: int) -> DeviceMesh:
        """Return a mesh over all ranks, flat or (replicate, shard); made once per size."""
        wanted = self.config.fsdp_shard_size if shard_size == -1 else shard_size
        world_size = self.context.world_size
        size = resolve_shard_size(wanted, world_size)
        if size not in self._meshes:
            # From the second dimension on: one of all ranks needs no replicas.
            first = int(size == world_size)
            self._meshes[size] = init_device_mesh(
                self.context.device.type,
                (world_size // size, size)[first:],
                mesh_dim_names=("replicate", "shard")[first:],
            )
        return self._meshes[size]

    def prepare_model(
        self,
        model: nn.Module,
        *,
        is_training: bool = False,
        shard_size: int = -1,
        reshard: bool = True,
    ) -> nn.Module:
        """Shard a model in place; one that is sharded already is returned as it is.

        Weights in training keep float32 shards (bfloat16 with `use_mp_opt`) and float32 gradients,
        others are stored in the compute dtype, without gradients. Parameters on the meta device
        are read from the model's directory; if rank 0 has real ones, those are sent to all ranks.
        See `StrategyBase.prepare_model`.
        """
        if isinstance(model, FSDPModule):
            return model
        share_sequences(model, self.context.sp_group, is_trained=is_training)
        stores_compute_dtype = not is_training or self.uses_master_weights
        plan = ShardingPlan(
            mesh=self._mesh(shard_size),
            device=self.context.device,
            param_dtype=self.context.compute_dtype if stores_compute_dtype else torch.float32,
            compute_dtype=self.context.compute_dtype,
            reshard_after_forward=reshard,
            offloads_to_cpu=self.config.fsdp_cpu_offload and is_training,
            keeps_vision_whole=self.config.mixed_mm_data,
            compile_backend=self.config.compile_backend,
        )
        if not is_training:
            model.eval().requires_grad_(False)
        with phase("shard a model", self.context.timeout):
            on_meta = meta_parameters(model)
            if not is_empty_everywhere(on_meta):
                shard_module(model, plan)
            else:
                path = pretrained_directory(model)
                shard_empty_module(model, plan)
                training_state.load_full_weights(path, model, strict=True, names=on_meta)
        if is_training:
            accumulate_in_float32(model)
        return model

    def create_optimizer(self, module: nn.Module, settings: AdamSettings) -> Optimizer:
        """Create AdamW on this rank's shards; biases and norm gains are not decayed."""
        reshard_modules(module)
        if self.uses_master_weights:
            return MasterWeightsAdamW(self.parameter_groups(module, settings), settings)
        return super().create_optimizer(module, settings)

    def prepare_training(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> PreparedModel:
        """Accept also an optimizer made before sharding, as long as it has not stepped."""
        if not isinstance(model, FSDPModule):
            if optimizer.state:
                raise ValueError(
                    "an optimizer that has stepped cannot follow its model into FSDP2: call "
                    "prepare_model(model, is_training=True) before create_optimizer"
                )
            names = {id(p): name for name, p in model.named_parameters()}
            model = self.prepare_model(model, is_training=True)
            sharded = dict(model.named_parameters())
            for group in optimizer.param_groups:
                group["params"] = [sharded[names[id(p)]] for p in group["params"]]
        return PreparedModel(model, optimizer, scheduler)

    def parameter_source(self, model: AnyModel) -> ParameterSource:
        """Return shards without any gather; see `StrategyBase.parameter_source`."""
        return fsdp2_parameter_source(inner_module(model))

    def check_trainable(self, model: AnyModel) -> None:
        """Raise a TypeError for a model that is not sharded."""
        as_fsdp(wrapped_module(model))

    def backward(self, loss: Tensor, model: AnyModel, *, is_last: bool) -> None:
        """Add the gradients of one micro-batch.

        Gradients are reduced to shards after every micro-batch, so they never take the memory of
        a whole model. On a hybrid mesh the replicas exchange them on the last one only.
        """
        module = wrapped_module(model)
        is_exchanged = is_last or not CAN_FORGET
        as_fsdp(module).set_requires_all_reduce(is_exchanged)
        (self._unfinished.discard if is_exchanged else self._unfinished.add)(module)
        super().backward(loss, model, is_last=is_last)

    def discard_gradients(self, optimizer: Optimizer) -> None:
        """Drop the gradients, also those that wait for the replicas' exchange."""
        super().discard_gradients(optimizer)
        parameter_ids = {id(p) for p in optimizer_parameters(optimizer)}
        for module in [
            m for m in self._unfinished if parameter_ids & {id(p) for p in m.parameters()}
        ]:
            as_fsdp(module).reset_iter_state()
            self._unfinished.discard(module)

    def global_norm(self, parameters: Iterable[Tensor]) -> float:
        """Return one norm, summed over all ranks."""
        return gradient_norm(parameters, self.context.device)

    def offload_optimizer(self, optimizer: Optimizer) -> None:
        """Move the states to the CPU with `adam_offload`, bit for bit; idempotent."""
        moves = self.config.adam_offload and not self.config.fsdp_cpu_offload
        if moves and optimizer not in self._offloaded:
            move_states(optimizer, torch.device("cpu"))
            self._offloaded.add(optimizer)
            if self.context.has_gpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def load_optimizer(self, optimizer: Optimizer, device: torch.device | None) -> None:
        """Move offloaded states back; `step` calls it if the caller did not."""
        if optimizer in self._offloaded:
            move_states(optimizer, torch.device(device or self.context.device))
            self._offloaded.discard(optimizer)

    def move_model(self, model: AnyModel, device: torch.device) -> nn.Module:
        """Move an idle model's shards."""
        reshard_modules(inner_module(model))
        return super().move_model(model, device)


class FSDPV2Strategy(StrategyBase):
    """FSDP2: parameters, gradients and optimizer states are sharded over ranks.

    Every repeated block is a unit; embeddings, a tied or untied head and the rest form the root
    unit. The wrapper's forward is the only entry into a sharded model.

    Args:
        seed, max_norm, micro_train_batch_size, train_batch_size, args: See `StrategyBase`.
        bf16: Replaces the configuration's `bf16`: compute in bfloat16 with float32 shards, states
            and reductions. None keeps it.
    """

    def __init__(
        self,
        seed: int = 42,
        max_norm: float = 0.0,
        micro_train_batch_size: int = 1,
        train_batch_size: int = 1,
        bf16: bool | None = None,
        args: Arguments | None = None,
    ) -> None:
        sizes = (seed, max_norm, micro_train_batch_size, train_batch_size)
        super().__init__(*sizes, args, backend=FSDP2Backend, fsdp=True, bf16=bf16)


def move_states(optimizer: Optimizer, device: torch.device) -> None:
    """Start all copies without waiting; to the host through pinned memory, bit for bit.

    Towards the device the stream orders later work; towards the host the caller synchronises
    before anybody reads.
    """
    for state in optimizer.state.values():
        for key, value in state.items():
            # The counter stays where the optimizer put it.
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[key] = _moved(value, device)


def _moved(value: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu" and value.is_cuda:
        # A copy into pageable memory waits for each tensor, at a fraction of the link's rate.
        host = torch.empty_like(value, device=device, pin_memory=True)
        return host.copy_(value, non_blocking=True)
    return value.to(device, non_blocking=True)
