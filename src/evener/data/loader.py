"""What a `torch.utils.data.DataLoader` may bring along, and the `order=` that replaces what it may not.

evener draws the order itself, as a pure function of (seed, epoch), the same on every rank: a sampler that draws from
its own generator, knows ranks, or makes batches cannot keep the global batch. Each is refused with the line that does.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from evener.errors import DataError

# Executable as they stand once `dataset`, `n`, `weights` and the like are the user's; the tests execute them.
_MIX = "from evener.dist.mix import mix"
_GENERATOR = "generator=torch.Generator().manual_seed(mix(seed, epoch))"


def order_of(loader: DataLoader[Any], rows: int | None) -> str | None:
    """The order word that the loader's sampler means; None for a stream (`rows` is None), which has no sampler.

    Raises:
        DataError: a batch sampler, `batch_size=None`, or a sampler other than sequential or random over all rows.
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is None:
        raise DataError(
            "the DataLoader has batch_size=None: its dataset returns whole batches, and evener needs rows.",
            fix=["give a dataset whose items are single rows; global_batch_size makes the batches"],
        )
    if rows is None:
        return None
    if type(batches) is not BatchSampler:
        raise DataError(
            f"the DataLoader has its own batch sampler ({type(batches).__name__}); evener cuts the batches itself.",
            fix=[
                "order=lambda seed, epoch: [row for batch in batch_sampler for row in batch]",
                "with global_batch_size= its batch size; the order must be the same on every rank",
            ],
        )
    if isinstance(sampler, DistributedSampler):
        word = "shuffle" if sampler.shuffle else "sequential"
        raise DataError(
            "the DataLoader has a DistributedSampler; evener shards by itself, without padding or repeated rows.",
            fix=[f'pass the dataset itself: loader.dataset, with order="{word}"'],
        )
    if type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement):
        if len(sampler) == rows:
            return "sequential" if type(sampler) is SequentialSampler else "shuffle"
        raise DataError(
            f"the DataLoader's {type(sampler).__name__} gives {len(sampler)} of the dataset's {rows} rows.",
            fix=_part(sampler, len(sampler)),
        )
    raise DataError(
        f"the DataLoader has a sampler that evener does not take over: {type(sampler).__name__}.",
        evidence=["evener draws the order itself, the same on every rank and after every resume"],
        fix=_recipe(sampler),
    )


def _part(sampler: SequentialSampler | RandomSampler, count: int) -> list[str]:
    if isinstance(sampler, SequentialSampler):
        return [f"order=lambda seed, epoch: range({count})"]
    return [
        f"order=lambda seed, epoch: torch.randperm(len(dataset), {_GENERATOR})[:{count}]",
        f"with {_MIX}",
    ]


def _recipe(sampler: object) -> list[str]:
    if isinstance(sampler, WeightedRandomSampler):
        n, replacement = sampler.num_samples, sampler.replacement
        line = f"order=lambda seed, epoch: torch.multinomial(weights, {n}, replacement={replacement}, {_GENERATOR})"
        return [line, f"with {_MIX}"]
    if isinstance(sampler, RandomSampler):  # with replacement
        n = sampler.num_samples
        return [f"order=lambda seed, epoch: torch.randint(len(dataset), ({n},), {_GENERATOR})", f"with {_MIX}"]
    if isinstance(sampler, SubsetRandomSampler):
        return ['pass torch.utils.data.Subset(dataset, indices), with order="shuffle"']
    return [
        "order=lambda seed, epoch: list(sampler)",
        "the list must be the same on every rank: let the sampler draw from (seed, epoch) only",
    ]


def ignored(loader: DataLoader[Any], gathered: bool, stream: bool) -> list[str]:
    """What the loader says and evener decides otherwise, one line each; `gathered`: the data is tensors in memory."""
    notes = [f"the DataLoader's batch_size={loader.batch_size} is not used: global_batch_size decides"]
    if loader.drop_last:
        notes.append("the DataLoader's drop_last=True is not used: say drop_last=True to Run")
    if loader.num_workers and gathered:
        notes.append(
            f"the DataLoader's num_workers={loader.num_workers} is not used: tensors in memory are gathered here"
        )
    if stream and loader.num_workers > 1:
        notes.append(f"the DataLoader's num_workers={loader.num_workers} is 1: a stream has one reader per rank")
    if loader.generator is not None:
        notes.append("the DataLoader's generator is not used: the order comes from (seed, epoch)")
    return notes
