"""Weights of a vLLM engine: updates through its layerwise reload, and hashes of its storage."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightrft.engines.engine_weights import AssembledWeights
from lightrft.engines.process_state import preserved_process_state
from lightrft.engines.vllm.adapters import AdapterBuffers, plain_modules
from lightrft.engines.vllm.backend import StartedEngine
from lightrft.engines.vllm.experts import repack_on_cpu
from lightrft.engines.vllm.layout import Layout, Place
from lightrft.engines.vllm.loading import saved_tensors


@contextmanager
def reloading(backend: StartedEngine) -> Iterator[None]:
    """Set the state for writing and repacking vLLM's layers.

    Without AVX-512, oneDNN's layout of a packed weight depends on the number of threads.
    """
    from vllm.config import set_current_vllm_config

    with preserved_process_state(backend.num_threads), set_current_vllm_config(backend.vllm_config):
        yield


class VLLMWeights(AssembledWeights):
    """Weights of vLLM's model, updated by whole modules.

    vLLM keeps references to loaded tensors until a module is complete. A module with only some of
    its tensors would compute with uninitialised ones. So pieces are copied, and a module is loaded
    once, when it is complete.

    Args:
        backend: Started engine.
        layout: Parameters of the engine.
        engine_name: Name of the engine in errors.
        adapters: Adapters beside the weights, which are then those of the checkpoint.
    """

    def __init__(
        self,
        backend: StartedEngine,
        layout: Layout,
        engine_name: str,
        adapters: AdapterBuffers | None = None,
    ) -> None:
        device = next(backend.model.parameters()).device
        apart = () if adapters is None else adapters.manifest
        super().__init__((*layout.manifest, *apart), engine_name, device=device)
        self.adapters = adapters
        self.unwritten.update(parameter.name for parameter in apart)
        self._backend = backend
        self._layout = layout
        self.modules = plain_modules(backend.model)
        self._reloaded: set[str] = set()

    def forget_engine(self) -> None:
        """Drop the references to vLLM, whose model and cache they would keep alive."""
        self._forget()
        self.modules = {}
        self.adapters = None
        del self._backend

    def equal_views(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Return views of vLLM's tensors that equal these, in type and values, and lie on a device.

        Without parameters that vLLM holds in several pieces, or otherwise.
        """
        views = {name: self._view(name, tensor) for name, tensor in tensors.items()}
        return {
            name: view
            for name, view in views.items()
            if view.device == device and torch.equal(view, tensors[name].to(device))
        }

    def _view(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a view of vLLM's tensor in the shape of another; an empty tensor if none fits."""
        places = self._layout.places.get(name, ())
        rows = self._rows(places[0]) if len(places) == 1 else like.new_empty(0)
        fits = rows.dtype == like.dtype and rows.numel() == like.numel() and rows.is_contiguous()
        return rows.view(like.shape) if fits else like.new_empty(0)

    def shared_names(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the names of lent parameters.

        Raises:
            RuntimeError: Trainer and vLLM read one of them at two addresses.
        """
        self._require_resident("shared_names")
        apart = [
            name
            for name, tensor in tensors.items()
            if self._view(name, tensor).data_ptr() != tensor.data_ptr()
        ]
        if apart:
            raise RuntimeError(
                f"{len(apart)} of {len(tensors)} weights that trainer and vLLM hold once lie at "
                f"two addresses (first: {min(apart)}): move no frozen weights of the actor, or "
                "give lora_sync merged"
            )
        return frozenset(tensors)

    def _rows(self, place: Place) -> torch.Tensor:
        """Return the rows of vLLM's tensor at a place."""
        parameter = self.modules[place.module_name].get_parameter(place.attribute)
        tensor = parameter.detach().flatten(0, place.num_row_dims - 1)
        return tensor[place.local_start : place.local_start + place.num_rows]

    def _hand_over(self, tensors: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.adapters is not None:
            self.adapters.write(tensors)
            return
        tensors = {name: tensor for name, tensor in tensors.items() if name in self._layout.modules}
        with reloading(self._backend):
            if not self._is_updating:
                self._is_updating = True
                self._reloaded.clear()
                initialize_layerwise_reload(self._backend.model)
            modules = {self._layout.modules[name] for name in tensors}
            with self._filled_directly(modules & self._layout.direct_modules):
                self._backend.model.load_weights(iter(self._as_read(tensors).items()))  # type: ignore[operator]
        self._reloaded |= modules

    @contextmanager
    def _filled_directly(self, names: Iterable[str]) -> Iterator[None]:
        """Give modules memory while they are loaded, and process them then.

        A reload does both where tensors are filled by their loaders; others would be lost.
        """
        from vllm.model_executor.model_loader.reload import layerwise

        layers = [self.modules[name] for name in sorted(names)]
        for layer in layers:
            layerwise.materialize_layer(layer, layerwise.get_layerwise_info(layer))
        yield
        for layer in layers:
            layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))

    def _as_read(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors under the names by which vLLM knows them."""
        saved, model = self._layout.saved_names & tensors.keys(), self._layout.model
        if not saved or model is None:
            return tensors
        renamed = saved_tensors(model, {name: tensors[name] for name in saved})
        return {name: each for name, each in tensors.items() if name not in saved} | renamed

    def _end_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with reloading(self._backend):
            finalize_layerwise_reload(self._backend.model, self._backend.model_config)
            self._repack_tied_heads()
            repack_on_cpu(self.modules, self._reloaded)

    def _repack_tied_heads(self) -> None:
        """Repack the copy of the weight in CPU heads that are tied to the embedding.

        A reload repacks only modules that received a tensor, and a tied head receives none.
        """
        first: dict[int, torch.nn.Module] = {}
        for module in self._backend.model.modules():
            for tensor in module.parameters(recurse=False):
                is_shared = first.setdefault(id(tensor), module) is not module
                if is_shared and "cpu_linear" in vars(module):
                    vars(module).pop("_already_called_process_weights_after_loading", None)
                    module.quant_method.process_weights_after_loading(module)  # type: ignore[operator,union-attr]

    def _stored_hashes(self, names: Sequence[str]) -> list[int]:
        """Return the hashes; a collective of a tensor-parallel group."""
        if self._is_updating:
            raise RuntimeError(
                f"a weight update of the {self._engine_name} engine is open; call "
                "finish_weight_update() before hash_parameters()"
            )
        places, adapters = self._layout.places, self.adapters
        if adapters is None:
            return self._sum_over_group(self._local_hashes([places[name] for name in names]))
        # Adapters need a single rank, so there is nothing to sum.
        apart = [name for name in names if name in adapters.tensors]
        base = [name for name in names if name not in adapters.tensors]
        hashes = dict(zip(apart, adapters.hashes(apart), strict=True))
        hashes |= zip(base, self._local_hashes([places[name] for name in base]), strict=True)
        return [hashes[name] for name in names]

    def _local_hashes(self, places: Sequence[Sequence[Place]]) -> list[int]:
        """Return this rank's part of each parameter's hash, to be summed over the group."""
        from vllm.distributed.parallel_state import get_tp_group

        from lightrft.kernels import hash_tensors

        is_first = get_tp_group().rank_in_group == 0
        parts, starts, owners = [], [], []
        for owner, place in (
            (i, place) for i, places_of_owner in enumerate(places) for place in places_of_owner
        ):
            if place.is_replicated and not is_first:
                continue
            rows = self._rows(place).contiguous()
            row_size = rows[0].numel() if place.num_rows else 0
            parts.append(rows)
            starts.append(place.global_start * row_size)
            owners.append(owner)
        total = torch.zeros(len(places), dtype=torch.int64)
        # int64 addition wraps, which is the sum modulo 2^64.
        total.index_add_(
            0,
            torch.tensor(owners, dtype=torch.int64),
            torch.tensor(hash_tensors(parts, starts=starts), dtype=torch.int64),
        )
        summed: list[int] = total.tolist()
        return summed

    def _sum_over_group(self, hashes: list[int]) -> list[int]:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        if group.world_size == 1:
            return hashes
        total = torch.tensor(hashes, dtype=torch.int64)
        # int64 addition wraps, which is the sum modulo 2^64.
        dist.all_reduce(total, group=group.cpu_group)
        summed: list[int] = total.tolist()
        return summed
