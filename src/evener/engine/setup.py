"""Before the first step: what was given is checked, once, and the choices that follow from it are made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from evener.engine import batchnorm as bn
from evener.engine.cut import Cut, default_slice_size
from evener.engine.precision import DTYPES, Precision
from evener.errors import BatchSizeError, ModelError, UsageError, one_of, refuse_prepared

SHARDED = ("fsdp", "hsdp")


def check_model(model: object, *, blank: bool = False, trained: bool = True) -> torch.nn.Module:
    """The model itself, when it is a plain module on one device. blank: parameters without storage are all right.
    trained: not only evaluated or exported."""
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module.", fix=["Run(model, optimizer, ...)"]
        )
    wrapper = type(model).__name__
    wrapped = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(model, wrapped) or wrapper == "FullyShardedDataParallel" or hasattr(model, "_get_fsdp_state"):
        what = f"the model is already wrapped in {wrapper}; evener spreads it by itself."
        raise ModelError(what, fix=["pass the plain module (wrapped.module), before any wrapping"])
    if type(model).__name__ == "_FabricModule":
        refuse_prepared("model", model, "prepared.module", ModelError)
    if hasattr(model, "_original_forward"):
        what = "the model's forward was replaced by accelerator.prepare() (mixed precision); precision= does that here."
        fix = ["leave prepare() out", "or accelerator.unwrap_model(model, keep_fp32_wrapper=False)"]
        raise ModelError(what, fix=fix)
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not torch.nn.parameter.is_lazy(t)]
    if trained and any(tensor.is_inference() for tensor in tensors):
        what = "the model was made inside torch.inference_mode(): its tensors can never be trained."
        raise ModelError(what, fix=["make it outside of the block", "or copy.deepcopy(model), outside of the block"])
    placed = getattr(model, "hf_device_map", None)
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"}
    if len(devices) > 1 or (isinstance(placed, dict) and len(set(placed.values())) > 1):
        fix = ["load it without device_map='auto', on one device or on the CPU; evener moves it"]
        raise ModelError("the model is spread over several devices.", evidence=[", ".join(sorted(devices))], fix=fix)
    if not blank and any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ModelError("the model has parameters without storage (device 'meta').", fix=["load its weights first"])
    lazy = [name for name, p in model.named_parameters() if isinstance(p, torch.nn.parameter.UninitializedParameter)]
    if lazy:
        what = f"parameter {lazy[0]} is not initialised yet (a Lazy module)."
        raise ModelError(what, fix=["run one batch through the model before making the optimizer"])
    return model


def plain_module(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside torch.compile's wrapper."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else model


def plain_name(name: str) -> str:
    """A parameter's name without torch.compile's wrappers, which may be around any part of the model."""
    return name.replace("_orig_mod.", "")


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in state.items()}


def load_plain(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """`module.load_state_dict` for plain names."""
    names = {plain_name(name): name for name in module.state_dict()}
    module.load_state_dict({names.get(name, name): value for name, value in state.items()})


_SHAPES = 64  # kernels per function in exact mode; torch's own limit of 8 is few for evaluation and uneven ends


class Compiled:
    """`compile=True` for one model, until `remove`. The module stays itself: no wrapper, no other names.

    In fast mode the first shape gets kernels of its own and every other one shares kernels for any size, so an uneven
    end of an epoch compiles once. In exact mode every shape has its own: which kernels torch would share, and so the
    last bit, depends on the shapes that a rank has seen before.
    """

    def __init__(self, model: torch.nn.Module, *, exact: bool) -> None:
        self.model = model
        self.before = model._compiled_call_impl
        if self.before is not None:  # compiled by the script, in its own way
            return
        model.compile(dynamic=False if exact else None)
        if exact:
            model._compiled_call_impl = _one_kernel_per_shape(model._compiled_call_impl)

    def remove(self) -> None:
        self.model._compiled_call_impl = self.before


def compile_forward(block: torch.nn.Module) -> bn.Undo:
    """The same for one block of fsdp, whose own hooks gather it outside of what is compiled."""
    block.forward = torch.compile(block.forward)
    return bn.Undo(lambda: delattr(block, "forward"))  # the class's is back


def _one_kernel_per_shape(compiled: Any) -> Any:
    """Beyond its limit torch goes on without compiling, and with other last bits: here that is an error."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    limit = config.patch(recompile_limit=_SHAPES, fail_on_recompile_limit_hit=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with limit:
                return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit:
            what = f"exact=True with compile=True: more than {_SHAPES} kernels for one function of the model."
            evidence = ["every shape of a slice is compiled alone; the last bit would depend on which ones are"]
            fix = ["pad rows to a few lengths in collate_fn", "or compile=False, or exact=False"]
            raise ModelError(what, evidence=evidence, fix=fix) from None

    return call


def by_name(what: str, given: Any) -> dict[str, Any]:
    """{name: value}; a single value gets the empty name."""
    if not isinstance(given, Mapping):
        return {"": given}
    if not given or not all(isinstance(name, str) and name and "." not in name for name in given):
        raise UsageError(
            f"{what}s are given as {{name: {what}}}, with names that are not empty and have no dot.",
            evidence=[f"names: {list(given)!r}"],
            fix=['{"g": generator, "d": discriminator}'],
        )
    return dict(given)


def check_function(name: str, given: object, form: str) -> None:
    """`given` can be called as `form` says: "loss_fn(model, batch)"."""
    wants = f"{name} is called as {form}"
    if not callable(given):
        raise UsageError(f"{name} is a {type(given).__name__}, not a function.", fix=[wants])
    if str(getattr(given, "__module__", None) or "").startswith("torch.nn"):
        what = getattr(given, "__name__", type(given).__name__)
        raise UsageError(f"{name}={what}: torch's own functions do not take a model.", fix=[wants, "call it in there"])
    try:
        inspect.signature(given).bind(*form.partition("(")[2].rstrip(")").split(", "))
    except TypeError as error:
        raise UsageError(f"{name} cannot be called as {form}: {error}.", fix=[f"def {form}: ..."]) from None
    except ValueError:  # built-in: it does not say what it takes
        pass


def for_target(keyword: str, value: Any, name: str, names: Sequence[str]) -> Any:
    """The value of a keyword that may be given once for all optimizers, or as {optimizer's name: value}."""
    if len(names) == 1 or not isinstance(value, Mapping) or not set(value) & set(names):
        if len(names) > 1 and keyword == "scheduler" and value is not None and not isinstance(value, Mapping):
            what = f"there are {len(names)} optimizers: a schedule drives one of them."
            raise UsageError(what, fix=[f'scheduler={{"{names[0]}": ...}}'])
        return value
    unknown = set(value) - set(names)
    if unknown:
        one_of(f"{keyword}'s optimizer", sorted(unknown)[0], names)
    return value.get(name)


def check_exact(model: torch.nn.Module) -> None:
    """What cannot be equal to the last bit on every world size is refused."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ModelError(f"exact=True: parameter {name} is complex, which is not supported.", fix=["exact=False"])
    for path, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(
            module, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            what = f"exact=True: {path or 'the model'} rewrites its weights in the forward (max_norm=), slice by slice."
            raise ModelError(what, fix=["leave max_norm out", "or exact=False"])
        if plain_module(module) is not module or module._compiled_call_impl is not None:
            what = f"exact=True: {plain_name(path + '.').strip('.') or 'the model'} is already compiled."
            evidence = ["its kernels, and so its last bits, depend on the shapes that it has seen before"]
            fix = ["pass it uncompiled, with compile=True: one kernel per shape", "or exact=False"]
            raise ModelError(what, evidence=evidence, fix=fix)


def check_batchnorm(model: torch.nn.Module, batchnorm: str, *, strategy: str, exact: bool) -> None:
    """Refuse what contradicts `batchnorm="sync"`, and layers that communicate without being asked to."""
    if batchnorm != "sync":
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm) and module.training and strategy not in ("single", "dp"):
                what = f"{path or 'the model'} is a SyncBatchNorm: it communicates where ranks may differ."
                raise ModelError(what, fix=['batchnorm="sync": evener synchronises it', "or use BatchNorm layers"])
    elif exact:
        raise UsageError(
            'batchnorm="sync" with exact=True: its statistics are of rows that happen to be computed at the same time.',
            fix=['batchnorm="slice", with slice_size= the rows that BatchNorm should see together', "or exact=False"],
        )
    elif strategy == "dp":
        raise UsageError(
            'batchnorm="sync" synchronises processes; strategy="dp" is one process.', fix=['strategy="ddp"']
        )


def check_sparse(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            what = f"{path or 'the model'} makes sparse gradients (sparse=True), which are not supported."
            raise ModelError(what, fix=["sparse=False: the gradient is then dense"])


def choose_strategy(asked: str, world_size: int) -> str:
    """auto is ddp for several processes and single for one; anything else is checked against the world size."""
    if asked == "auto":
        return "ddp" if world_size > 1 else "single"
    if asked == "single" and world_size > 1:
        what = f'strategy="single" with {world_size} processes: each would train alone.'
        raise UsageError(what, fix=['strategy="ddp" (or "auto")', "or start one process"])
    if asked == "dp" and world_size > 1:
        what = f'strategy="dp" is one process with several GPUs; this job has {world_size} processes.'
        raise UsageError(what, fix=['strategy="ddp", which is also faster', "or start one process"])
    return asked


def check_traffic(
    compression: str | None, sync_every: int | None, precision: Precision, strategy: str, exact: bool, world_size: int
) -> tuple[Precision, tuple[str, ...]]:
    """The precision with gradients reduced as asked, and what is approximate then, in words."""
    name, value = ("sync_every", sync_every) if compression is None else ("gradient_compression", compression)
    if value is None:
        return precision, ()
    said = f"{name}={value!r}"
    if exact:
        what = f"{said} with exact=True: the result would be another, and depend on the number of processes."
        raise UsageError(what, fix=[f"leave {name} out", "or exact=False: approximate, and labelled so"])
    if compression is not None and sync_every is not None:
        raise UsageError(f"{said} with sync_every={sync_every}: no gradients travel then.", fix=["one of the two"])
    if compression is None:
        if strategy in SHARDED:
            what = f'{said} with strategy="{strategy}": a rank holds a part of the parameters and cannot step alone.'
            raise UsageError(what, fix=['strategy="ddp"', 'or gradient_compression="bf16"'])
        words = f"ranks averaged every {'1 update' if sync_every == 1 else f'{sync_every} updates'}"
        return precision, (words,) if world_size > 1 else ()
    if precision.reduce is not None:
        what = f'{name}="{compression}" with precision={{"reduce": ...}}: two answers to one question.'
        raise UsageError(what, fix=["one of the two"])
    if world_size == 1:
        return precision, ()
    return replace(precision, reduce=DTYPES[compression]), (f"{compression} gradients between ranks",)


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch's decided factors. `why_coupled` is said in the contract line's notes."""

    cut: Cut
    coupled: bool
    exact: bool
    why_coupled: str | None


# BatchNorm's statistics over fewer rows are too noisy; a sixteenth of a small batch would be.
_BATCHNORM_ROWS = 32


def decide_batch(
    *,
    global_batch_size: int | None,
    microbatch_size: int | None,
    slice_size: int | None,
    exact: bool,
    coupled: bool | None,
    batchnorm: bool,
    rank: int,
    world_size: int,
) -> Batch:
    """Slices and microbatches from what was asked."""
    why = None
    if coupled is None and batchnorm:
        coupled, why = True, "BatchNorm sees one slice at a time"
    coupled = bool(coupled)
    for name, size in (("microbatch_size", microbatch_size), ("slice_size", slice_size)):
        if size is not None and global_batch_size is not None and size > global_batch_size:
            what = f"{name}={size} is larger than the global batch of {global_batch_size} rows."
            raise BatchSizeError(what, fix=[f"{name}={global_batch_size} or less"])
    if not (exact or coupled):
        if slice_size is not None:
            what = f"slice_size={slice_size} has no meaning here: rows are independent in fast mode."
            fix = ["exact=True or coupled=True", "microbatch_size=, if memory is what you want to bound"]
            raise BatchSizeError(what, fix=fix)
        return Batch(Cut(rank, world_size, microbatch_size, None), False, False, None)
    if slice_size is None:
        if global_batch_size is None:
            what = "an Engine in exact or coupled mode needs slice_size=: it does not know the global batch."
            raise BatchSizeError(what, fix=["slice_size=16", "or use evener.Run, which does"])
        slice_size = default_slice_size(global_batch_size, at_least=_BATCHNORM_ROWS if batchnorm else 1)
    if microbatch_size is not None and microbatch_size % slice_size:
        below, above = microbatch_size // slice_size * slice_size, -(-microbatch_size // slice_size) * slice_size
        near = f"{below} or {above}" if below else f"{above}"
        what = f"microbatch_size={microbatch_size} is not a whole number of slices of {slice_size} rows."
        evidence = ["in exact and coupled mode a slice is computed alone and is never cut"]
        fix = [f"microbatch_size={near}", f"or slice_size={microbatch_size}"]
        raise BatchSizeError(what, evidence=evidence, fix=fix)
    return Batch(Cut(rank, world_size, None, slice_size), coupled, exact, why)
