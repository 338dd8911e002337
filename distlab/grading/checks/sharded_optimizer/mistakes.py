"""The weights after the first step under known misconceptions of 3.13 and 3.16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.sharded_optimizer import scenarios
from distlab.grading.checks.sharded_optimizer.scenarios import One
from distlab.grading.kit.flat import flat
from distlab.grading.kit.values import Suspect, same_everywhere

Named = dict[str, Tensor]


def suspects_of(seed: int, gradients: list[Named]) -> list[Suspect]:
    """What known misconceptions leave after the first step."""
    n = len(gradients)
    mean = scenarios.mean_of(gradients)

    def after(gradient: Named, groups: Any = scenarios.make_groups) -> Tensor:
        one = One(seed, groups)
        one.step(gradient)
        return flat(scenarios.weights_of(one.model))

    def times(factor: float) -> Tensor:
        return after({name: value * factor for name, value in mean.items()})

    start, right = flat(scenarios.weights_of(One(seed).model)), after(mean)
    owners = owner_of_each(seed, n)
    own = torch.stack([after(gradient) for gradient in gradients])
    once = "divide the sum by comm.world_size, once"
    found = [
        _everywhere("sum-not-mean", times(n), n, f"{n} × the mean gradient", once),
        _everywhere("divided-twice", times(1 / n), n, f"1/{n} of the mean", once),
        Suspect(
            slug="",
            values=same_everywhere(start, n),
            sentence="the first step left all weights unchanged, expected an update",
            rule="scatter_gradients, then update",
        ),
        Suspect(
            slug="own-gradient-only",
            values=same_everywhere(own[owners, torch.arange(len(start))], n),
            sentence="each shard was updated with its own rank's gradient only, "
            "expected the mean over the ranks",
            rule="sum the gradients over the ranks before each shard takes its chunk",
        ),
        Suspect(
            slug="weights-not-gathered",
            values=[torch.where(owners == rank, right, start) for rank in range(n)],
            sentence="after the first step, each rank has new weights in its own "
            "shards only, expected all new weights",
            rule="after the optimizer's step, all_gather each bucket's shards",
        ),
    ]
    for index, which in enumerate(("first", "second")):
        values = after(mean, _one_setting(index))
        found.append(
            _everywhere(
                "group-settings-mixed",
                values,
                n,
                f"the {which} group's settings for all parameters, expected "
                "each group's own",
                "one group of shards for each parameter group, with its settings",
            )
        )
    found.append(
        _everywhere(
            "group-settings-mixed",
            after(mean, _exchanged_settings),
            n,
            "the two groups' settings swapped, expected each group's own",
            "a bucket's shard belongs to bucket.group",
        )
    )
    for keys in (("lr", "weight_decay"), ("weight_decay",), ("lr",)):
        found.append(
            Suspect(
                slug="group-settings-lost",
                values=same_everywhere(after(mean, _without(keys)), n),
                sentence=f"the first step used the optimizer's default "
                f"{' and '.join(keys)}, expected each group's own",
                rule="copy every entry of a group; replace only params",
            )
        )
    others = _other_chunks(n)
    return found + [_with_chunks(after, seed, mean, *other) for other in others]


def _other_chunks(n: int) -> list[tuple[str, list[int]]]:
    """Ways to take a wrong chunk of the gradient, in words, and by rank which it is."""
    ranks = list(range(n))
    return [
        ("every rank updated its shard with the first chunk", [0] * n),
        ("every rank updated its shard with the last chunk", [n - 1] * n),
        ("rank r updated its shard with chunk r + 1", [*ranks[1:], 0]),
        ("rank r updated its shard with chunk r - 1", [n - 1, *ranks[:-1]]),
        ("rank r updated its shard with chunk n - 1 - r", ranks[::-1]),
    ]


def _with_chunks(
    after: Callable[[Named], Tensor], seed: int, mean: Named, how: str, which: list[int]
) -> Suspect:
    """Each shard with the gradient of a chunk that may be another's."""
    gradient, n = Named(), len(which)
    for bucket in buckets_of(seed):
        own = torch.cat([mean[full].reshape(-1) for full in bucket])
        chunks = torch.cat([own, own.new_zeros(-len(own) % n)]).chunk(n)
        parts = torch.cat([chunks[chunk] for chunk in which])[: len(own)]
        pieces = parts.split([mean[full].numel() for full in bucket])
        shaped = zip(bucket, pieces, strict=True)
        gradient |= {full: piece.view_as(mean[full]) for full, piece in shaped}
    return Suspect(
        slug="chunk-of-another-rank",
        values=same_everywhere(after(gradient), n),
        sentence=f"{how} of the gradient, expected chunk r",
        rule="rank r's shard is chunk r of the weights, so it needs chunk r of the "
        "gradient",
    )


def _everywhere(slug: str, values: Tensor, n: int, how: str, rule: str) -> Suspect:
    sentence = f"the first step was taken with {how}"
    return Suspect(
        slug=slug, values=same_everywhere(values, n), sentence=sentence, rule=rule
    )


def _one_setting(index: int) -> Any:
    def groups(model: Any) -> list[dict[str, Any]]:
        settings = (scenarios.WEIGHTS, scenarios.OTHERS)[index]
        return [{"params": list(scenarios.trained(model).values()), **settings}]

    return groups


def _without(keys: tuple[str, ...]) -> Any:
    def groups(model: Any) -> list[dict[str, Any]]:
        given = scenarios.make_groups(model)
        return [{k: v for k, v in group.items() if k not in keys} for group in given]

    return groups


def _exchanged_settings(model: Any) -> list[dict[str, Any]]:
    first, second = scenarios.make_groups(model)
    return [
        {**second, "params": first["params"]},
        {**first, "params": second["params"]},
    ]


def buckets_of(seed: int) -> list[dict[str, int]]:
    """Layer by layer, group by group: the trained parameters' names and sizes."""
    found = []
    for name, layer in scenarios.make_model(seed).named_children():
        for is_weight in (True, False):
            own = {
                f"{name}.{rest}": p.numel()
                for rest, p in layer.named_parameters()
                if p.requires_grad and (p.dim() > 1) == is_weight
            }
            found += [own] if own else []
    return found


def owner_of_each(seed: int, n: int) -> Tensor:
    """The rank that owns each trained element, in the model's order."""
    owners = {}
    for bucket in buckets_of(seed):
        share = -(-sum(bucket.values()) // n)
        place = 0
        for full, size in bucket.items():
            owners[full] = torch.arange(place, place + size) // share
            place += size
    return torch.cat(
        [owners[name] for name in scenarios.trained(scenarios.make_model(seed))]
    )
