"""A dispatch mode that costs no more than its own code.

torch wraps `__torch_dispatch__` so that its compiler leaves it alone, and a call of the
wrapper takes as long as a small operator. Here the compiler is told once instead.
"""

from __future__ import annotations

from typing import Any

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.utils._python_dispatch import TorchDispatchMode

_LEAVE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


class RankMode(TorchDispatchMode):
    """The mode in which a simulated rank's operators are carried out."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        set_code_exec_strategy(cls.__torch_dispatch__.__code__, _LEAVE)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # not by a wrapper
