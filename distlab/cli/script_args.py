"""Commands that take a script with its own arguments, the way torchrun does.

distlab sim -n 256 train.py --lr 0.1          everything after the script is its own
distlab sim -n 256 -m package.train --lr 0.1
distlab sim 1.4 -n 64                         no script: options may stand anywhere
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

MODULE = "-m"


class ScriptCommand(TyperCommand):
    """Splits the line where the script begins; the verb gets it as `script`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the script and its arguments away, and parse what comes before."""
        at = self._start_of_script(args)
        if at is not None:
            ctx.meta[MODULE] = args[at:]
            args = args[:at]
        return super().parse_args(ctx, args)

    def _start_of_script(self, args: list[str]) -> int | None:
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.params
            for name in option.opts
        }
        skip = False
        for index, arg in enumerate(args):
            if skip:
                skip = False
            elif arg == MODULE or (arg.endswith(".py") and not arg.startswith("-")):
                return index
            else:
                skip = takes_value.get(arg, False) and arg.startswith("-")
        return None


def script_of(ctx: Any) -> tuple[str, tuple[str, ...], bool] | None:
    """The script on the command line: target, arguments, and whether it is a module.

    Raises:
        ValueError: -m without a module.
    """
    words = ctx.meta.get(MODULE)
    if not words:
        return None
    if words[0] != MODULE:
        return words[0], tuple(words[1:]), False
    if len(words) < 2:
        raise ValueError("-m needs the name of a module, as in -m package.train")
    return words[1], tuple(words[2:]), True
