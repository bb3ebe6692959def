"""Names for every tensor of a run: the same whatever wraps, shards or compiles the model. Knows nothing of files.

    model.<name in the GPT>                   a weight; one that two modules share is there once
    optimizer.<name in the GPT>.<moment>      what the optimizer keeps for it
    other.<name in the LightningModule>       anything else in the module's state

The optimizer's state is walked here rather than through ``torch.distributed.checkpoint.state_dict``: that one takes an
optimizer step with zero gradients to find out what the state looks like, and expects every rank to hold all of it.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

MODEL, OPTIMIZER, OTHER = "model.", "optimizer.", "other."
WRAPPERS = {"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
SWITCHES = {"fused", "foreach", "capturable", "differentiable"}  # how to compute, not what: the running one's stay
Stored = Mapping[str, TensorStorageMetadata]


def plain_name(name: str) -> str:
    """The name without what compiling, DDP or recomputation put into it."""
    plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return plain if plain.startswith(MODEL) else OTHER + plain


def module_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The module's own tensors by plain name, each once, and for each further name of a shared one the first."""
    tensors: dict[str, Tensor] = {}
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for wrapped, tensor in module.state_dict(keep_vars=True).items():
        name = plain_name(wrapped)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{wrapped} is a {type(tensor).__name__}; a checkpoint stores a module's tensors only")
        if name in tensors:
            raise ValueError(f"two tensors of the module are called {name}")
        if id(tensor) in first_name:
            aliases[name] = first_name[id(tensor)]
        else:
            tensors[name] = tensor
            first_name[id(tensor)] = name
    return tensors, aliases


def optimizer_tensors(
    optimizers: Iterable[Optimizer], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The optimizers' tensors by name, and their parameter groups: hyper-parameters, and parameters by name."""
    names = {id(weight): name.removeprefix(MODEL) for name, weight in weights.items()}
    tensors: dict[str, Tensor] = {}
    documents: list[dict[str, Any]] = []
    for optimizer in optimizers:
        groups: list[dict[str, Any]] = []
        numbers: dict[str, Any] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                for moment, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        tensors[f"{OPTIMIZER}{name}.{moment}"] = value
                    else:
                        numbers.setdefault(name, {})[moment] = value
            settings = {key: _number(value) for key, value in group.items() if key not in {"params", *SWITCHES}}
            groups.append({"parameters": [names[id(parameter)] for parameter in group["params"]], **settings})
        documents.append({"class": type(optimizer).__name__, "groups": groups, "numbers": numbers})
    return tensors, documents


def _number(value: Any) -> Any:
    """A learning rate may be a tensor, for compiled optimizers."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


class OptimizerRestore:
    """Places for the saved optimizer tensors to be read into, and the optimizers that get them afterwards."""

    def __init__(self, optimizers: Iterable[Optimizer], weights: Mapping[str, Tensor], stored: Stored) -> None:
        self.names = {id(weight): name.removeprefix(MODEL) for name, weight in weights.items()}
        self.optimizers = list(optimizers)
        moments: dict[str, list[str]] = {}
        for key in stored:
            if key.startswith(OPTIMIZER):
                name, _, moment = key.removeprefix(OPTIMIZER).rpartition(".")
                moments.setdefault(name, []).append(moment)
        self.tensors: dict[str, Tensor] = {}
        self.states: list[tuple[Optimizer, Tensor, dict[str, Any]]] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self.names[id(parameter)]
                    state = {
                        moment: _place(parameter, stored[f"{OPTIMIZER}{name}.{moment}"], group)
                        for moment in moments.get(name, ())
                    }
                    self.tensors |= {f"{OPTIMIZER}{name}.{moment}": tensor for moment, tensor in state.items()}
                    self.states.append((optimizer, parameter, state))

    def apply(self, documents: list[dict[str, Any]]) -> None:
        """After the reading: hands the tensors over and sets the hyper-parameters by the parameters' names."""
        numbers = {name: values for document in documents for name, values in document["numbers"].items()}
        for optimizer, parameter, state in self.states:
            state.update(numbers.get(self.names[id(parameter)], {}))
            if state:
                optimizer.state[parameter] = state
        settings = {
            name: group for document in documents for group in document["groups"] for name in group["parameters"]
        }
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                saved: dict[str, Any] = next(
                    (settings[n] for p in group["params"] if (n := self.names[id(p)]) in settings), {}
                )
                for key, value in saved.items():
                    if key != "parameters" and key not in SWITCHES:
                        _set(group, key, value)


def _place(parameter: Tensor, stored: TensorStorageMetadata, group: dict[str, Any]) -> Tensor:
    """An empty tensor for one moment: like the parameter, or, for a step count, where this optimizer wants it."""
    if stored.size == parameter.shape and parameter.dim() > 0:
        return torch.zeros_like(parameter.detach())
    on_device = group.get("fused") or group.get("capturable")
    device = local(parameter).device if on_device or stored.size.numel() > 1 else torch.device("cpu")
    return torch.zeros(stored.size, dtype=stored.properties.dtype, device=device)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_out(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """What this rank writes: its shards, and its share of what other ranks hold as well.

    That goes, largest first, to the holder that has least so far; every rank comes to the same result without talking. So
    nothing is written twice, and nothing that another rank writes is copied or kept here.
    """
    mine: dict[str, Tensor] = {}
    load_bytes: dict[int, list[int]] = {}  # by number of holders, of each
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        own, holders = holder(tensors[name]) if isinstance(tensors[name], DTensor) else (rank, ranks)  # type: ignore[arg-type]
        loads = load_bytes.setdefault(holders, [0] * holders)
        lightest = min(range(holders), key=loads.__getitem__)
        loads[lightest] += tensors[name].nbytes
        if lightest == own:
            mine[name] = tensors[name]
    return mine


def holder(tensor: DTensor) -> tuple[int, int]:
    """(which of those that hold the same part of ``tensor`` this rank is, how many they are)."""
    own, holders = 0, 1
    for dim, place in enumerate(tensor.placements):
        if place.is_replicate():
            own = own * tensor.device_mesh.size(dim) + tensor.device_mesh.get_local_rank(dim)
            holders *= tensor.device_mesh.size(dim)
    return own, holders


class _Buffer(NamedTuple):
    """What host memory a tensor needs."""

    shape: torch.Size
    dtype: torch.dtype
    pinned: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "_Buffer":
        source = local(tensor)
        return cls(source.shape, source.dtype, source.is_cuda)

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu", pin_memory=self.pinned)


class Stager:
    """Copies tensors into host memory that is kept from save to save, page-locked where there is a GPU.

    Page-locking takes seconds for a large model; ``prepare`` has it done before the first save, by a thread of its own.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self._preparing: threading.Thread | None = None
        self._hurry = threading.Event()  # a save waits for the buffers
        self._stop = threading.Event()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Begins to make the buffers that ``stage`` will need for tensors like these. Returns at once."""
        if self._preparing is not None:
            return
        # the thread gets shapes only: it must neither keep tensors alive nor see one that training replaces
        wanted = {name: _Buffer.of(tensor) for name, tensor in tensors.items() if name not in self.buffers}
        self._preparing = threading.Thread(target=self._prepare, args=(wanted,), name="checkpoint-buffers")
        self._preparing.start()

    def _prepare(self, wanted: dict[str, _Buffer]) -> None:
        for name, buffer in wanted.items():
            if self._stop.is_set():
                return
            start = time.perf_counter()
            try:
                self.buffers[name] = buffer.make()
            except RuntimeError:
                return  # ``stage`` will try again, and raise it where somebody hears of it
            # page-locking holds the driver's lock: training's launches get their turn, unless a save waits for this
            self._hurry.wait(time.perf_counter() - start)

    def _prepared(self) -> None:
        """Returns once no other thread makes buffers."""
        if self._preparing is not None:
            self._hurry.set()
            self._preparing.join()

    def close(self) -> None:
        """Ends the preparing."""
        self._stop.set()
        self._prepared()

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies that later training steps do not change. Blocks until the last one has arrived."""
        self._prepared()
        self.buffers = {name: buffer for name, buffer in self.buffers.items() if name in tensors}
        staged = {name: self._copy(name, tensor.detach()) for name, tensor in tensors.items()}
        if any(local(tensor).is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return staged

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        source = local(tensor)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = _Buffer.of(source).make()
            self.buffers[name] = buffer
        buffer.copy_(source, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        return DTensor.from_local(
            buffer, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
