"""One process, several GPUs (DataParallel's way): the model is replicated and loss_fn runs on every replica.

Unlike nn.DataParallel the loss is computed where the outputs are, so nothing large is gathered, and each part counts by
its rows: uneven parts are weighted exactly. On the CPU, parts run one after another on the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from evener import batch as batches
from evener.engine.mean import Mean
from evener.engine.spread import Spread
from evener.engine.tally import as_loss
from evener.errors import DeviceError, UsageError


class DP(Spread):
    """`strategy="dp"`.

    Args:
        device_ids: GPU slots; all visible ones by default. The model lives on the first.
        output_device: The slot where losses are added up; the first device by default.
        scatter: Weights, one per device ((3, 1) gives the first device three quarters of the rows), or a function
            scatter(batch, parts) that returns one batch per device.
    """

    name = "dp"

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        device_ids: Sequence[int] | None,
        output_device: int | None,
        scatter: Any,
    ) -> None:
        super().__init__(parameters)
        self.scatter = scatter
        weights = scatter if isinstance(scatter, list | tuple) else None
        if device.type == "cuda":
            ids = list(device_ids) if device_ids is not None else list(range(torch.cuda.device_count()))
            if not ids or len(set(ids)) < len(ids) or not set(ids) <= set(range(torch.cuda.device_count())):
                what = f"device_ids={ids}: slots are different numbers from 0 to {torch.cuda.device_count() - 1}."
                raise DeviceError(what, fix=["slots count inside CUDA_VISIBLE_DEVICES"])
            if ids[0] != device.index:
                what = f"the model must live on the first of device_ids: it is on {device}, device_ids={ids}."
                raise DeviceError(what, fix=[f'device="cuda:{ids[0]}"', f"or device_ids starting with {device.index}"])
            self.devices = [torch.device("cuda", i) for i in ids]
            self.output = torch.device("cuda", ids[0] if output_device is None else output_device)
        elif device_ids:
            raise DeviceError(f"device_ids={list(device_ids)}: there are no GPUs on {device}.", fix=["leave it out"])
        else:
            self.devices, self.output = [device] * len(weights or (1,)), device
        if weights is not None and (len(weights) != len(self.devices) or min(weights) < 0 or not sum(weights)):
            what = f"scatter={scatter!r}: one weight per device ({len(self.devices)}), none negative, not all 0."
            raise UsageError(what, fix=[f"scatter={tuple([1] * len(self.devices))}"])

    def _parts(self, batch: Any, rows: int) -> list[Any]:
        if callable(self.scatter):
            parts = list(self.scatter(batch, len(self.devices)))
            given = sum(batches.rows(part) for part in parts)
            if len(parts) > len(self.devices) or given != rows:
                what = f"scatter returned {len(parts)} parts of {given} rows; {len(self.devices)} devices, {rows} rows."
                raise UsageError(what, fix=["return at most one part per device, with every row exactly once"])
            return parts
        weights = self.scatter or [1] * len(self.devices)
        edges = [round(rows * sum(weights[:k]) / sum(weights)) for k in range(len(weights) + 1)]
        return [batches.part(batch, start, stop) for start, stop in pairwise(edges) if stop > start]

    def forward(self, loss_fn: Callable[..., Any], model: Any, batch: Any, rows: int) -> Any:
        parts = self._parts(batch, rows)
        if len(parts) == 1:
            return loss_fn(model, parts[0])
        sizes = [batches.rows(part) for part in parts]
        if self.output.type == "cuda":
            outputs = self._on_gpus(loss_fn, model, parts)
        else:
            outputs = [loss_fn(model, part) for part in parts]
        return self._join(outputs, sizes, rows)

    def _on_gpus(self, loss_fn: Callable[..., Any], model: Any, parts: list[Any]) -> list[Any]:
        from torch.nn.parallel import parallel_apply, replicate

        devices = self.devices[: len(parts)]
        replicas: Any = replicate(model if isinstance(model, torch.nn.Module) else torch.nn.ModuleDict(model), devices)
        if isinstance(model, dict):
            replicas = [dict(replica.items()) for replica in replicas]
        moved = [(replica, batches.move(part, device)) for replica, part, device in zip(replicas, parts, devices)]
        # It calls them with the arguments given and asks for nothing else of a module.
        calls: Any = [loss_fn] * len(parts)
        return list(parallel_apply(calls, moved, devices=devices))

    def _join(self, outputs: list[Any], sizes: list[int], rows: int) -> Any:
        """One loss with one denominator from the parts' losses, on the output device."""
        losses, kinds, metrics = zip(*(as_loss(output, size) for output, size in zip(outputs, sizes)))

        def here(value: Any) -> Any:
            return value.to(self.output) if isinstance(value, torch.Tensor) else value

        def add(means: Sequence[Mean]) -> Mean:
            total = sum(here(one.value) * (1 if one.form == "total" else here(one.count)) for one in means)
            return Mean(total=total, count=sum(here(one.count) for one in means))

        loss = add(losses)
        joined = {name: add([one[name] for one in metrics]) for name in metrics[0]}
        return (loss.value / rows if all(kinds) else loss), joined
