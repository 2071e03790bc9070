"""Weights, gradients and moments split over the processes: fully sharded data parallelism (FSDP2).

Source: Rajbhandari et al. 2020, ZeRO stage 3 (arXiv:1910.02054), by PyTorch's `fully_shard`. In an update each process
keeps its rows of every weight; those of a layer are gathered for its passes, and gradients are added up as they arise.
All processes must then make equal numbers of passes.

Between updates the main module is whole on every process: it samples, answers, is saved and read like any other, and
no process waits for another. The other modules are whole within `Shards.whole` only.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import WorldError


class Shards:
    """The sharded modules of a run.

    Args:
        modules: What is trained, the main one first.
        frozen: What else is sharded.
    """

    def __init__(self, modules: Sequence[nn.Module], frozen: Sequence[nn.Module] = ()) -> None:
        self._main, self._others = modules[0], (*modules[1:], *frozen)
        device = next(self._main.parameters()).device
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        self._versions: dict[str, int] = {}
        if is_sharded(self._main):  # by an earlier agent; since then a checkpoint may have been read into it
            self._split_main()
        for module in (self._main, *self._others):
            _shard(module, mesh)
        self._gather_main()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All modules whole on every process, for passes without gradients; all processes enter and leave together."""
        for module in self._others:
            _gather(module)
        yield
        for module in self._others:
            _split(module)

    @contextmanager
    def split(self) -> Iterator[None]:
        """All modules split, for an update; afterwards the main one is whole again. Entered and left together."""
        self._split_main()
        yield
        for module in self._others:
            _split(module)  # what a pass has left whole
        self._gather_main()

    def before_pass(self) -> None:
        """Gather what lies outside the layers: a pass may use it without calling the module as a whole."""
        for module in (self._main, *self._others):
            _parts(module)[0].unshard()

    def _gather_main(self) -> None:
        _gather(self._main)
        self._versions = {name: weight._version for name, weight in self._main.named_parameters()}

    @torch.no_grad()
    def _split_main(self) -> None:
        """Put into the shards what was written into the whole weights, such as a folder's."""
        weights = {name: weight for name, weight in self._main.named_parameters() if mesh_of(weight) is None}
        written = [name for name, weight in weights.items() if weight._version != self._versions.get(name)]
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own = {name: weights[name].detach()[chunk(len(weights[name]), rank, count)].clone() for name in written}
        _split(self._main)
        for name, weight in self._main.named_parameters():
            if name in own:
                weight.copy_(from_rows(own[name], weight))


def make_shards(
    modules: Mapping[str, nn.Module], frozen: Sequence[nn.Module], *, sharding: str, count: int
) -> Shards | None:
    """Shards the modules of a run in place, if its setting says so and there is more than one process.

    Raises:
        ValueError: A LoRA adapter is trained, or modules that an earlier agent has sharded shall be whole.
        WorldError: This version of torch cannot shard as it is needed here.
    """
    if sharding == "none":
        if split := [name for name, module in modules.items() if is_sharded(module)]:
            raise ValueError(
                f"sharding: expected 'full', got 'none': an earlier agent has sharded this model ({', '.join(split)}). "
                "Else load it anew."
            )
        return None
    if lora := [name for name, module in modules.items() if hasattr(module, "peft_config")]:
        raise ValueError(
            f"sharding: expected 'none' to train a LoRA adapter ({', '.join(lora)}), got 'full'. What is trained is "
            "small, and the frozen model is best whole on every process."
        )
    if count == 1:
        return None
    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_force_sum_reduction_for_comms"):
        raise WorldError(
            f"sharding='full' needs FSDPModule.set_force_sum_reduction_for_comms of torch, which {torch.__version__} "
            "does not have. Install a newer torch, or leave sharding='none'."
        )
    return Shards(list(modules.values()), frozen)


def chunk(size: int, rank: int, count: int) -> slice:
    """The rows of `size` that process `rank` of `count` keeps."""
    each = -(-size // count)
    return slice(min(rank * each, size), min((rank + 1) * each, size))


def own_rows(tensor: Tensor) -> slice:
    """The rows of a sharded tensor that are here; all of any other one."""
    mesh = mesh_of(tensor)
    return slice(None) if mesh is None else chunk(tensor.shape[0], mesh.get_local_rank(), mesh.size())


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The processes that a tensor (a `DTensor`, which older versions of torch lack) is sharded over."""
    return getattr(tensor, "device_mesh", None)


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that is here; any other one itself."""
    sharded: Any = tensor
    here: Tensor = tensor if mesh_of(tensor) is None else sharded.to_local()
    return here


def full(tensor: Tensor) -> Tensor:
    """A sharded tensor as a whole, which all processes ask for together; any other one itself."""
    sharded: Any = tensor
    whole: Tensor = tensor if mesh_of(tensor) is None else sharded.full_tensor()
    return whole


def from_rows(rows: Tensor, like: Any) -> Tensor:
    """A tensor that is sharded as `like`, of type and device of it, from the rows that are here."""
    moved, mesh = rows.to(local(like)), mesh_of(like)
    if mesh is None:
        return moved
    from torch.distributed.tensor import DTensor

    shape, stride = like.shape, like.stride()
    return DTensor.from_local(moved, mesh, like.placements, run_check=False, shape=shape, stride=stride)


def is_sharded(module: nn.Module) -> bool:
    """Whether a run has sharded the module."""
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a module in place, layer by layer; nothing if it is sharded already."""
    if is_sharded(module):
        return
    names = set(chain.from_iterable(getattr(each, "_no_split_modules", None) or () for each in module.modules()))
    layers = [each for each in module.modules() if type(each).__name__ in names and each is not module]
    # Gradients are added up in float32, then take the type of their weights.
    options: Any = {"mesh": mesh, "mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for layer in (*reversed(layers), *_apart(module, layers)):
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(module, **options, reshard_after_forward=False)
    # This module is the root, whichever part of it is called first.
    root: Any = module
    root._get_fsdp_state()._lazy_init()
    for part in _parts(module):
        # Losses are sums over a count of all processes already.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        _keep_whole_when_read(part)
    # By default the order is that of earlier passes, such as sampling, which processes make different numbers of.
    order: list[Any] = [module, *layers, module]
    for before, after in pairwise(order if layers else []):
        after.set_modules_to_backward_prefetch([before])


def _apart(module: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules outside the layers that are sharded alone: weights of another type, and all where there are no layers."""
    inside = {part for layer in layers for part in layer.modules()}
    owners = [
        part
        for part in module.modules()
        if part not in inside and next(part.parameters(recurse=False), None) is not None
    ]
    dtype = next(module.parameters()).dtype
    return [
        part
        for part in owners
        if part is not module and (not layers or any(p.dtype != dtype for p in part.parameters(recurse=False)))
    ]


def _keep_whole_when_read(part: Any) -> None:
    """Let a state_dict of whole weights be made of them, and be read into them: by default they are split for it."""
    state = part._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is not None:
            hooks = (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle)
            for handle in chain.from_iterable(each.values() for each in hooks):
                handle.remove()


def _parts(module: nn.Module) -> list[Any]:
    """The module and its layers."""
    return [each for each in module.modules() if isinstance(each, fsdp.FSDPModule)]


@torch.no_grad()
def _gather(module: nn.Module) -> None:
    for part in _parts(module):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()


def _split(module: nn.Module) -> None:
    for part in _parts(module):
        part.set_reshard_after_forward(part is not module, recurse=False)
        part.reshard()
