"""What a `torch.utils.data.DataLoader` may bring along, and the `order=` that replaces what it may not.

evener draws the order itself, as a pure function of (seed, epoch), the same on every rank: a sampler that draws from
its own generator, knows ranks, or makes batches cannot keep the global batch. Each is refused with the line that does.
"""

from __future__ import annotations

from typing import Any

from torch.utils import data as torch_data

from evener.errors import DataError

# Executable as they stand once `dataset`, `n`, `weights` and the like are the user's; the tests execute them.
_ORDER = "order=lambda seed, epoch: "
_MIX = "with from evener.dist.mix import mix"
_GENERATOR = "generator=torch.Generator().manual_seed(mix(seed, epoch))"


def order_of(loader: torch_data.DataLoader[Any], rows: int | None) -> str | None:
    """The order word that the loader's sampler means; None for a stream (`rows` is None), which has no sampler."""
    batches, sampler = loader.batch_sampler, loader.sampler
    name, evidence = type(sampler).__name__, []
    if batches is None:
        what = "the DataLoader has batch_size=None: its dataset returns whole batches, and evener needs rows."
        fix = ["give a dataset whose items are single rows; global_batch_size makes the batches"]
    elif rows is None:
        return None
    elif type(batches) is not torch_data.BatchSampler:
        what = f"the DataLoader has its own batch sampler ({type(batches).__name__}); evener cuts the batches itself."
        fix = [
            f"{_ORDER}[row for batch in batch_sampler for row in batch]",
            "with global_batch_size= its batch size; the order must be the same on every rank",
        ]
    elif isinstance(sampler, torch_data.DistributedSampler):
        word = "shuffle" if sampler.shuffle else "sequential"
        what = "the DataLoader has a DistributedSampler; evener shards by itself, without padding or repeated rows."
        fix = [f'pass the dataset itself: loader.dataset, with order="{word}"']
    else:
        sequential = type(sampler) is torch_data.SequentialSampler
        if sequential or (type(sampler) is torch_data.RandomSampler and not sampler.replacement):
            count = len(sampler)  # type: ignore[arg-type]
            if count == rows:
                return "sequential" if sequential else "shuffle"
            what = f"the DataLoader's {name} gives {count} of the dataset's {rows} rows."
            fix = [f"{_ORDER}torch.randperm(len(dataset), {_GENERATOR})[:{count}]", _MIX]
            fix = [f"{_ORDER}range({count})"] if sequential else fix
        else:
            what = f"the DataLoader has a sampler that evener does not take over: {name}."
            evidence = ["evener draws the order itself, the same on every rank and after every resume"]
            fix = _recipe(sampler)
    raise DataError(what, evidence=evidence, fix=fix)


def _recipe(sampler: object) -> list[str]:
    if isinstance(sampler, torch_data.WeightedRandomSampler):
        n, replacement = sampler.num_samples, sampler.replacement
        return [f"{_ORDER}torch.multinomial(weights, {n}, replacement={replacement}, {_GENERATOR})", _MIX]
    if isinstance(sampler, torch_data.RandomSampler):  # with replacement
        return [f"{_ORDER}torch.randint(len(dataset), ({sampler.num_samples},), {_GENERATOR})", _MIX]
    if isinstance(sampler, torch_data.SubsetRandomSampler):
        return ['pass torch.utils.data.Subset(dataset, indices), with order="shuffle"']
    return [
        f"{_ORDER}list(sampler)",
        "the list must be the same on every rank: let the sampler draw from (seed, epoch) only",
    ]


def ignored(loader: torch_data.DataLoader[Any], gathered: bool, stream: bool) -> tuple[str, ...]:
    """What the loader says and evener decides otherwise, one line each; `gathered`: the data is tensors in memory."""
    workers = f"the DataLoader's num_workers={loader.num_workers} is"
    notes = {
        f"the DataLoader's batch_size={loader.batch_size} is not used: global_batch_size decides": True,
        "the DataLoader's drop_last=True is not used: say drop_last=True to Run": loader.drop_last,
        f"{workers} not used: tensors in memory are gathered here": loader.num_workers and gathered,
        f"{workers} 1: a stream has one reader per rank": loader.num_workers > 1 and stream,
        "the DataLoader's generator is not used: the order comes from (seed, epoch)": loader.generator is not None,
    }
    return tuple(note for note, applies in notes.items() if applies)
