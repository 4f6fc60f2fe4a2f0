"""BatchNorm: found, frozen, or synchronised over ranks (`batchnorm="sync"`).

torch's SyncBatchNorm refuses the CPU, waits for the device to drop empty ranks, and communicates in any training-mode
forward. Here a layer keeps its identity, names and buffers and only its class is exchanged while an engine lives; it
communicates inside of an update, on any device, and a rank of weight 0 takes part with a count of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from evener.engine.join import Join


def layers(model: torch.nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def has_batchnorm(model: torch.nn.Module) -> bool:
    return any(module.training for module in layers(model))


def freeze(model: torch.nn.Module) -> list[Any]:
    """Running statistics stay as they are, also after a later model.train(). Returns handles that undo it."""

    def stay(module: torch.nn.Module, args: object) -> None:
        module.training = False

    training = [module for module in layers(model) if module.training]
    handles: list[Any] = [Undo(module.train) for module in training]
    for module in layers(model):
        module.eval()
        handles.append(module.register_forward_pre_hook(stay))
    return handles


@dataclass(frozen=True, slots=True)
class Undo:
    """A handle like those of hooks."""

    remove: Callable[[], object]


def synchronise(model: torch.nn.Module, join: Join) -> list[Any]:
    """Statistics over the pieces that all ranks compute at the same time. Returns handles that undo it.

    The layers stay the same objects; copies of them (deepcopy, pickle) are of the original class.
    """
    return exchange(layers(model), _Synchronised, {"join": join})


def exchange(modules: Iterable[torch.nn.Module], base: type, members: dict[str, Any]) -> list[Any]:
    """Give each module a class of `base` and its own, with these members. Returns handles that undo it."""
    modules = list(modules)
    classes = {kind: type(kind.__name__, (base, kind), {**members, "plain": kind}) for kind in set(map(type, modules))}
    return [Exchanged(module, classes[type(module)]) for module in modules]


class Exchanged:
    """A module whose class is another one until `remove`: object, names and state stay."""

    def __init__(self, module: torch.nn.Module, kind: type) -> None:
        self.module, self.before, self.kind = module, type(module), kind
        module.__class__ = kind

    def remove(self) -> None:
        if type(self.module) is self.kind:  # not where sharding has made a class of its own from it
            self.module.__class__ = self.before

    @staticmethod
    def blank(kind: type[torch.nn.Module]) -> torch.nn.Module:
        """For copies of such a module, which are of the class it had before."""
        return kind.__new__(kind)


class _Synchronised(_BatchNorm):
    join: ClassVar[Join]
    plain: ClassVar[type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Exchanged.blank, (self.plain,), self.__dict__

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.join.inside):
            output: torch.Tensor = super().forward(input)
            return output
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        output, mean, var, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.join
        )
        if self.track_running_stats and not self.join.idle:
            assert self.num_batches_tracked is not None
            assert self.running_mean is not None and self.running_var is not None
            self.num_batches_tracked.add_(1)
            # Without a momentum the average is cumulative, as in torch.
            move = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
            unbiased = var * (count / (count - 1).clamp(min=1))
            with torch.no_grad():
                self.running_mean.mul_(1 - move).add_(mean.to(self.running_mean.dtype), alpha=move)
                self.running_var.mul_(1 - move).add_(unbiased.to(self.running_var.dtype), alpha=move)
        return output


class _Normalise(torch.autograd.Function):
    """Batch normalisation whose mean and variance are of all ranks' inputs. One gather forward, one sum backward.

    Per rank (mean, variance, count) travel, not sums of squares: those cancel where the mean is large. The gradient of
    a loss that is summed over ranks needs the sums of dy and of dy * x_hat over ranks; those of weight and bias stay
    this rank's own, as any other parameter's do.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, join: Join) -> Any:
        wide = x if x.dtype == torch.float64 else x.float()
        over = [dim for dim in range(x.ndim) if dim != 1]
        var, mean = torch.var_mean(wide, over, correction=0)
        channels = mean.numel()
        mine = torch.cat([mean, var, mean.new_full((1,), x.numel() // channels)])
        if join.idle:
            mine.zero_()
        every = torch.empty(dist.get_world_size(join.group), mine.numel(), dtype=mine.dtype, device=mine.device)
        dist.all_gather(list(every.unbind(0)), mine, group=join.group)
        means, variances, counts = every.split([channels, channels, 1], dim=1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        var = ((variances + (means - mean).square()) * counts).sum(0) / count
        ctx.join, ctx.idle, ctx.over = join, join.idle, over
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), count)
        ctx.mark_non_differentiable(mean, var, count)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps), mean, var, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        x, weight, mean, inverse, count = ctx.saved_tensors
        along = [1, -1] + [1] * (x.ndim - 2)
        wide = dy.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(along)) * inverse.view(along)
        of_bias, of_weight = wide.sum(ctx.over), (wide * normal).sum(ctx.over)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([of_bias, of_weight])
            if ctx.idle:
                sums.zero_()  # also where the row of weight 0 made a NaN
            dist.all_reduce(sums, group=ctx.join.group)
            first, second = (sums / count).unbind(0)
            dx = wide - first.view(along) - normal * second.view(along)
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            dx = (dx * scale.view(along)).to(x.dtype)
        if weight is None:
            return dx, None, None, None, None
        return dx, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None
