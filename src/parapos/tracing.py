"""What PyTorch does around a call: autocast, compiling, exporting, function transforms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """A context without gradients, at whose end the hooks are removed."""
    with ExitStack() as stack, torch.no_grad():
        for hook in hooks:
            stack.enter_context(hook)
        yield


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switches autocast off: positional arithmetic never runs in half precision. Devices without autocast need nothing.

    A program that is compiled or exported carries the switch with it, because it may run under autocast later.
    """
    known = torch.amp.is_autocast_available(device.type)
    needed = known and (torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type))
    return torch.autocast(device.type, enabled=False) if needed else nullcontext()


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype). An exported program always casts: under autocast it may meet another type than it was made with."""
    return torch.ops.aten._to_copy(x, dtype=dtype) if torch.compiler.is_exporting() else x.to(dtype)


def is_transformed() -> bool:
    """Whether a function transform (torch.func) or forward-mode differentiation is active. Compiling is neither."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def is_plain(x: Tensor) -> bool:
    """Whether x is a tensor of PyTorch, not of a subclass, which may hold its numbers elsewhere."""
    return type(x) in (Tensor, nn.Parameter)


def is_watched(x: Tensor) -> bool:
    """Whether something follows the operators that x meets: a compiler, a tracer, a counter."""
    is_traced = torch.compiler.is_compiling() or torch._C._is_tracing() or x.is_meta or not is_plain(x)
    return is_traced or torch._C._len_torch_dispatch_stack() > 0 or _len_torch_dispatch_stack_pre_dispatch() > 0
