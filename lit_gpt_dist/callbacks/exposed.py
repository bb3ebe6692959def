"""Marks when a sampled step does nothing but wait for communication. Never waits itself; off between samples.

DDP reduces gradients while backward goes on; what is left after the last gradient is exposed. FSDP2 waits where it needs a
block's gathered weights, where it hands gradients to the reduction, and at the end of backward; unpacking counts too.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from lit_gpt_dist.callbacks.clock import Clock

FSDP_WAITS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")  # methods of FSDPParamGroup


class ExposedCommunication:
    """Pairs of marks (begin, end) of waits in a sampled step, told apart by forward and backward.

    Args:
        clock: of the device.

    Attributes:
        active: a step is being sampled.
        in_backward: set by whoever knows.
        pairs: (in backward, begin, end).
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.active = False
        self.in_backward = False
        self.pairs: list[tuple[bool, Any, Any]] = []
        self._last_gradient: Any = None
        self._undo: list[Callable[[], None]] = []

    def install(self, module: Any, replicated: bool, sharded: bool) -> None:
        if replicated:
            self._watch_last_gradients(module.model)
        if sharded:
            self._watch_fsdp()

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def begin(self) -> None:
        self.active, self.in_backward, self.pairs, self._last_gradient = True, False, [], None

    def backward_ended(self, mark: Any) -> None:
        """``mark`` is when backward returned: under DDP everything after the last gradient was waiting."""
        if self._last_gradient is not None:
            self.pairs.append((True, self._last_gradient, mark))
            self._last_gradient = None

    def _watch_last_gradients(self, gpt: nn.Module) -> None:
        """The parameters used first in forward get their gradients last in backward."""
        first_used = [gpt.get_submodule("embedding"), gpt.get_submodule("blocks.0")]
        for part in first_used:
            for parameter in part.parameters():
                self._undo.append(parameter.register_post_accumulate_grad_hook(self._on_gradient).remove)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self.active:
            self._last_gradient = self.clock.mark()

    def _watch_fsdp(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        for name in FSDP_WAITS:
            original = getattr(FSDPParamGroup, name, None)
            if original is not None:  # a private name: where it is gone, its share stays unknown
                setattr(FSDPParamGroup, name, self._timed(original))
                self._undo.append(functools.partial(setattr, FSDPParamGroup, name, original))

    def _timed(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(*args, **kwargs)
            begin = self.clock.mark()
            try:
                return original(*args, **kwargs)
            finally:
                self.pairs.append((self.in_backward, begin, self.clock.mark()))

        return timed
