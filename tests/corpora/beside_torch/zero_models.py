"""Small models for `zero_trainings.py`, each with what a user's model may have.

All have a `branch`, a layer that may leave its own parameter out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5


class Branch(nn.Module):
    """A linear layer, and a gain that is used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        """`x` (rows, WIDTH), changed."""
        out: Tensor = self.linear(x).tanh()
        return out * self.gain if self.is_used else out


class Plain(nn.Module):
    """Four layers; the branch is the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branch = Branch()
        self.third = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, 3)."""
        out: Tensor = self.last(self.third(self.branch(self.first(x))))
        return out


class LeftOut(Plain):
    """The whole branch is left out, not its gain alone."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, 3)."""
        x = self.first(x)
        if self.branch.is_used:
            x = self.branch(x)
        out: Tensor = self.last(self.third(x))
        return out


class Tied(Plain):
    """The last layer has the first one's weights, as a language model's head."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight


class Direct(Plain):
    """Parameters on the model itself, used first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shifts = nn.ParameterList([torch.zeros(3)])

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, 3)."""
        found: Tensor = super().forward(x * self.scale) * 2 + self.shifts[0]
        return found


class Listed(Plain):
    """Layers in a list, and lists of lists."""

    def __init__(self) -> None:
        super().__init__()
        more = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.layers = nn.ModuleList([more[0], nn.ModuleList(more[1:])])
        self.named = nn.ModuleDict({"one": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, 3)."""
        nested: Any = self.layers[1]
        for layer in (self.layers[0], *nested, self.named["one"]):
            x = layer(x).tanh()
        return super().forward(x)


class Pair(nn.Module):
    """Gives two tensors, in a tuple or in a dict."""

    def __init__(self, *, is_dict: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.is_dict = is_dict

    def forward(self, x: Tensor) -> Any:
        """Two of (rows, WIDTH), the first nested."""
        one, two = self.linear(x).chunk(2, 1)
        return {"one": [one], "two": two} if self.is_dict else ([one], two, None)


class Tuples(Plain):
    """A layer gives a tuple."""

    is_dict = False

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(is_dict=self.is_dict)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, 3)."""
        found = self.pair(x)
        (one,), two = list(found.values()) if self.is_dict else found[:2]
        return super().forward(one.tanh() * two.sigmoid())


class Dicts(Tuples):
    """A layer gives a dict."""

    is_dict = True


class Table(nn.Module):
    """Gives a part of its own weights, as a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, WIDTH))

    def forward(self, rows: int) -> Tensor:
        """(rows, WIDTH)."""
        return self.weight[:rows]


class Views(Plain):
    """A layer gives a view of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, 3)."""
        return super().forward(x * self.table(len(x)))


class Checkpointed(Plain):
    """Layers are computed again within backward()."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, 3)."""
        x = self.first(x)
        for layer in (self.branch, self.third):
            x = checkpoint(layer, x, use_reentrant=self.is_reentrant)
        out: Tensor = self.last(x)
        return out


class Reentrant(Checkpointed):
    """The same, with a backward() inside of backward()."""

    is_reentrant = True


class Twice(Plain):
    """Two forwards through all layers."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, 3)."""
        return super().forward(x) * super().forward(x.flip(0))
