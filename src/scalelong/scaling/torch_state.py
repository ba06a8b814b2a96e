"""Whether somebody follows a computation by other means than autograd's gradients; while compiling, nobody does."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode


def in_transform() -> bool:
    """Inside torch.func (vmap, jvp and the like) or forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Inside a transform, or of a mode that sees every torch function or operator, such as our trace or a FLOP counter."""
    if torch.compiler.is_compiling():
        return False
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    functions = [mode for mode in modes if not isinstance(mode, DeviceContext)]  # a default device only makes tensors
    return bool(functions) or _get_current_dispatch_mode() is not None or in_transform()
