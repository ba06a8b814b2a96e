"""Whether somebody follows a computation by other means than autograd's gradients."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def in_transform() -> bool:
    """Inside torch.func (vmap, jvp and the like) or forward-mode differentiation, outside of a compiler."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
