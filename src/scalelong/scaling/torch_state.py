"""What else is watching a computation: functorch transforms, forward-mode AD, function and dispatch modes."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode


def in_transform() -> bool:
    """True inside functorch transforms (vmap, jvp, ...) or forward-mode AD; False while compiling."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_watched() -> bool:
    """True inside a transform, or under a mode that sees every torch function or operator, e.g. a FLOP counter."""
    if torch.compiler.is_compiling():
        return False
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    functions = [mode for mode in modes if not isinstance(mode, DeviceContext)]  # a default device only creates tensors
    return bool(functions) or _get_current_dispatch_mode() is not None or in_transform()
