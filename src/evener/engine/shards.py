"""A model's parameters, sharded over ranks in place by FSDP2's `fully_shard`, and whole again where somebody looks.

The model stays the user's own module with its plain names. Blocks gather their parameters for their own forward and
backward; what is left belongs to the model and is gathered for the whole of loss_fn, so that any of its methods may be
called there. The optimizer holds plain tensors: this rank's rows of each parameter, sharing memory with the model's
DTensors. That keeps its kernels (fused, with a skip on the device) and needs one thing of it: no element of an update
may depend on other rows of the same tensor, which is tried out before.
"""

from __future__ import annotations

import copy
import functools
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from evener.dist import comm
from evener.dist.blank import materialise
from evener.engine.blocks import find_blocks
from evener.engine.optim import check_rowwise
from evener.engine.precision import Precision
from evener.errors import ModelError, UsageError, one_of


@dataclass(frozen=True, slots=True)
class Options:
    """What `fsdp={...}` holds."""

    blocks: tuple[Any, ...] | None = None  # module names, class names, modules or classes; None: found by repetition
    reshard_after_forward: bool | int = True  # False keeps gathered parameters until the backward (ZeRO-2)
    shard_ranks: int | None = None  # hsdp: ranks that hold one copy together; None: those of a node
    accumulate: str = "reduce"  # "keep": whole gradients on every rank between microbatches, one reduction
    apart: tuple[str, ...] = ()  # models of several: no blocks, so that any of their methods may be called

    @staticmethod
    def of(given: Mapping[str, Any] | None, strategy: str, of_a_node: int, apart: tuple[str, ...]) -> Options:
        """With `shard_ranks` decided: under hsdp the ranks of a node unless told otherwise."""
        if given is not None and strategy not in ("fsdp", "hsdp"):
            what = f'fsdp= belongs to strategy="fsdp" and "hsdp"; this one is "{strategy}".'
            raise UsageError(what, fix=['strategy="fsdp"', "leave it out"])
        given = dict(given or {})
        blocks = given.pop("blocks", None)
        if blocks is not None:
            given["blocks"] = tuple(blocks) if isinstance(blocks, list | tuple | set) else (blocks,)
        options = Options(**given, apart=apart)
        one_of('fsdp["accumulate"]', options.accumulate, ["reduce", "keep"])
        among = options.shard_ranks
        if among is not None and (isinstance(among, bool) or not isinstance(among, int)):
            raise UsageError(f'fsdp["shard_ranks"]={among!r}: a number of ranks.', fix=['strategy="hsdp": of a node'])
        after = options.reshard_after_forward
        if not isinstance(after, bool | int):
            raise UsageError(f'fsdp["reshard_after_forward"]={after!r}: True, False or a number of ranks.')
        if strategy == "hsdp":
            return replace(options, shard_ranks=among or of_a_node)
        if among is not None:
            what = f'fsdp["shard_ranks"]={among} belongs to strategy="hsdp"; this one is "{strategy}".'
            raise UsageError(what, fix=['strategy="hsdp"', "leave it out: over all ranks"])
        return options


@dataclass(slots=True)
class Shard:
    """One parameter: the model's (a DTensor; itself where it is not sharded) and what the optimizer holds of it."""

    name: str
    owner: Module
    key: str
    shape: torch.Size
    local: Parameter
    rows: tuple[int, int] | None  # this rank's rows; None: whole on every rank (no dimension to shard)

    @property
    def source(self) -> Any:
        return self.owner._parameters[self.key]


class Place(NamedTuple):
    device: torch.device
    rank: int
    world_size: int
    policy: Any  # FSDP's MixedPrecisionPolicy


class Root(Module):
    """What FSDP takes for the model: everything that loss_fn does happens in one forward of this."""

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.model = model
        self.before: list[Callable[[], None]] = []  # called when the model's own parameters are gathered

    def forward(self, call: Callable[[], Any]) -> Any:
        self.model.unshard()  # type: ignore[operator]
        for hook in self.before if torch.is_grad_enabled() else ():
            hook()
        return call()


class Shards:
    """Shards `model` when constructed. On all ranks; parameters are rank 0's, or come from `weights`.

    fill: Gives a blank model (on the meta device) its values once it is sharded: `load`, or a copy of other shards.
        Without it they come from `seed`, block by block.
    """

    def __init__(
        self, model: Module, options: Options, at: Place, fill: Callable[[Shards], None] | None = None, seed: int = 0
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        from evener.engine.spread.fsdp import Gather  # its imports cost as much as torch's own

        self.model, self.options = model, options
        self.device, self.rank, self.world, policy = at
        device, rank, world_size = self.device, self.rank, self.world
        # Ranks in a row hold one copy together; ranks with the same place in it hold the same rows.
        self.among = options.shard_ranks or world_size
        self.copy, self.place = divmod(rank, self.among)
        copies = world_size // self.among
        sizes = (copies, self.among)[copies == 1 :]
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
        self.group = mesh.get_group(mesh.ndim - 1)
        self.blocks = find_blocks(model, options.blocks, options.apart)
        if type(model).forward is Module.forward:  # a container of models: FSDP takes none without a forward
            model.__class__ = type(type(model).__name__, (type(model),), {"forward": _refuse_call})
        before = dict(model.named_parameters())
        whole = {p for p in before.values() if p.ndim == 0}
        reshard = options.reshard_after_forward
        shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=whole)
        left = {id(p): p for p in before.values() if p.ndim}
        blank = any(tensor.is_meta for tensor in (*before.values(), *model.buffers()))
        if blank and fill is None and _resets_above(model, self.blocks):
            materialise(model, "cpu", seed)  # a reset goes over several blocks
        for name, unit in [*self.blocks.items(), ("", model)]:
            if blank and fill is None:
                materialise(unit, "cpu", seed, name)
            own = [left.pop(id(parameter)) for parameter in unit.parameters() if id(parameter) in left]
            for parameter in own:
                _prepare(parameter, device)
            # The model's own parameters are used again as soon as the backward begins.
            shard(unit, reshard_after_forward=reshard if unit is not model else False)
            for parameter in own:  # whoever still refers to the whole tensor no longer holds its memory
                parameter.data = parameter.data.new_empty(0)
        for parameter in whole:
            _prepare(parameter, device)
        if blank and fill is not None:
            model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        root: Any = shard(Root(model))
        self.root: Any = root
        self.parts: list[Any] = [one for one in root.modules() if hasattr(one, "_get_fsdp_state")]
        with torch.no_grad():
            root(lambda: None)  # now the root is known: a block may be called on its own from here on
            if blank and len(before) < sum(1 for _ in model.named_parameters(remove_duplicate=False)):
                for part in self.parts:  # one after the other; tied parameters are one again afterwards
                    part.unshard()
                    part.reshard()
        self.reshard()
        self.shards = {name: self._shard(name, before[name]) for name in before}
        self.before = before  # emptied, but alive: another parameter must not get the id of one
        self.local_of = {id(before[name]): one.local for name, one in self.shards.items()}
        self.by_local = {id(one.local): one for one in self.shards.values()}
        if blank and fill is not None:
            fill(self)
        self.frozen: list[Any] = []  # while another optimizer's parameters train
        self.summed: dict[int, Any] = {}  # block -> what reduces its gradients
        self.log = array("i")  # collectives in their order: i + 1 gathers block i, -(i + 1) reduces it
        names = {id(module): name for name, module in model.named_modules()}
        self.names = [names[id(part)] or "what is in no block" for part in self.parts[1:]]
        for number, part in enumerate(self.parts[1:], 1):
            part.set_custom_all_gather(Gather(self.log, number))
        for part in self.parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        self.root.set_reduce_scatter_unused_params(True)

    def _shard(self, name: str, before: Parameter) -> Shard:
        path, _, key = name.rpartition(".")
        owner = self.model.get_submodule(path)
        source: Any = owner._parameters[key]
        if not before.ndim:  # left whole; another object where it had no storage before
            return Shard(name, owner, key, source.shape, source, None)
        local = Parameter(source.detach().to_local(), requires_grad=source.requires_grad)
        chunk = -(-source.shape[0] // self.among)
        start, stop = (min(edge * chunk, source.shape[0]) for edge in (self.place, self.place + 1))
        return Shard(name, owner, key, source.shape, local, (start, stop))

    # ------------------------------------------------------------------------------------------------ the optimizer

    def named(self) -> dict[str, Parameter]:
        """What the optimizer holds, by the parameter's name in the model."""
        return {name: one.local for name, one in self.shards.items()}

    def remap(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer holds this rank's rows from now on, of its state too. In place."""
        for group in optimizer.param_groups:
            group["params"] = [self.local_of.get(id(p), p) for p in group["params"]]
        for parameter, state in list(optimizer.state.items()):
            local = self.local_of.get(id(parameter))
            if local is not None:
                del optimizer.state[parameter]
                optimizer.state[local] = self.cut_state(local, state)

    def cut_state(self, local: Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """One parameter's optimizer state: tensors of the parameter's shape become this rank's rows."""
        one = self.by_local[id(local)]
        return {
            key: self.cut(one, value).to(self.device, copy=True)
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == one.shape
            else value
            for key, value in state.items()
        }

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """What a user did to the model's parameters (unfreezing, another group) is done to what the optimizer holds."""
        for one in self.shards.values():
            if one.local.requires_grad != one.source.requires_grad:
                one.local.requires_grad_(one.source.requires_grad)
        if any(id(p) not in self.by_local for group in optimizer.param_groups for p in group["params"]):
            here = {id(one.source): one.local for one in self.shards.values()}
            for group in optimizer.param_groups:
                group["params"] = [here.get(id(p), p) for p in group["params"]]

    # ------------------------------------------------------------------------------------------------ whole tensors

    def cut(self, one: Shard, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor."""
        return whole if one.rows is None else whole[slice(*one.rows)]

    def whole(self, one: Shard, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor from every rank's rows (of the parameter, or of a state of its shape). Collective."""
        local = local.detach()
        if one.rows is None or local.shape != one.local.shape or not local.ndim:
            return local
        chunk = -(-one.shape[0] // self.among)
        mine = local.new_zeros(chunk, *one.shape[1:])
        mine[: len(local)] = local
        every = mine.new_empty(self.among * chunk, *one.shape[1:])
        dist.all_gather(list(every.split(chunk)), mine, group=self.group)
        return every[: one.shape[0]]

    def kept(self, one: Shard, local: Any) -> Any:
        """As `whole`, for a state that rank 0 writes: on its host, and only there; a shape without values elsewhere."""
        if not isinstance(local, torch.Tensor):
            return local
        whole = self.whole(one, local)
        return whole.to("cpu", copy=True) if self.rank == 0 else torch.empty_like(whole, device="meta")

    def state_dict(self) -> dict[str, Any]:
        """The model's: whole tensors on rank 0. Collective."""
        self.reshard()
        by_id = {id(one.source): one for one in self.shards.values()}
        state = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            one = by_id.get(id(value))
            state[name] = self.kept(one, one.local) if one else value.detach().clone()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From whole tensors, the same on every rank. No communication."""
        self.reshard()
        by_id = {id(one.source): one for one in self.shards.values()}
        for name, value in self.model.state_dict(keep_vars=True).items():
            one = by_id.get(id(value))
            if one is not None:
                one.local.copy_(self.cut(one, state[name]))
            else:
                value.copy_(state[name])

    # ------------------------------------------------------------------------------------------------ forwards

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` where the model may be used: it communicates, so on all ranks alike."""
        try:
            result = self.root(functools.partial(function, *args))
        except RuntimeError as error:
            self.reset()
            if "mixed torch.Tensor and DTensor" in str(error):
                what = "a part of a block was called without the block: its parameters are not gathered."
                evidence = [f"blocks: {', '.join(self.blocks)}", str(error).splitlines()[0]]
                fix = ['name smaller blocks, which are always called: fsdp={"blocks": [...]}']
                raise ModelError(what, evidence=evidence, fix=fix) from error
            raise
        except BaseException:
            self.reset()
            raise
        if not torch.is_grad_enabled():
            self.reshard()
        return result

    def reset(self) -> None:
        """After a forward or backward that failed: nothing of it is left."""
        self.root.reset_iter_state()

    def gathered_by(self) -> Iterator[tuple[Any, list[Shard]]]:
        """(FSDP module, the parameters that it gathers): the innermost module around each."""
        nearest = {id(module): part for part in self.parts[1:] for module in part.modules()}  # inner ones come later
        for part in self.parts[1:]:
            yield part, [one for one in self.shards.values() if one.rows and nearest[id(one.owner)] is part]

    def order(self) -> int:
        """Of the collectives since `log` was emptied, in a number that is exact in float32."""
        return zlib.crc32(self.log.tobytes()) & 0xFFFFFF

    def refuse(self, log: array[int]) -> None:
        """Say where the ranks' orders differ. Collective.

        FSDP's collectives are paired by their order alone: another one of the same shape would be taken silently.
        """
        every = comm.all_gather(log.tolist())
        said = [
            [self._said(log[i]) if i < len(log) else "nothing" for log in every] for i in range(max(map(len, every)))
        ]
        i, first = next((i, one) for i, one in enumerate(said) if len(set(one)) > 1)
        other = next(rank for rank, what in enumerate(first) if what != first[0])
        raise ModelError(
            "ranks ran different blocks of the model at once: fsdp gathers each on all ranks at once.",
            evidence=[f"collective {i + 1} of them: rank 0 {first[0]}, rank {other} {first[other]}"],
            fix=[
                "draw which blocks run from something equal on all ranks: random.Random(number) with a number that the "
                "model counts, not torch's generator, which differs per slice",
                'strategy="ddp"',
            ],
        )

    def _said(self, entry: int) -> str:
        return f"{'gathers' if entry > 0 else 'reduces'} {self.names[abs(entry) - 1]}"

    def clear(self, pieces: Iterable[Shard] | None = None) -> None:
        """Let go of the gradients of the model's own parameters (of several optimizers': of one's)."""
        for one in self.shards.values() if pieces is None else pieces:
            one.source.grad = None

    def attend(self, pieces: Iterable[Shard]) -> None:
        """Only these train, until `release`: FSDP makes gradients of everything that does."""
        trained = {id(one) for one in pieces}
        self.frozen += [s.source for s in self.shards.values() if s.source.requires_grad and id(s) not in trained]
        for parameter in self.frozen:
            parameter.requires_grad_(False)

    def release(self) -> None:
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        self.frozen = []

    def reshard(self) -> None:
        for part in self.parts:
            part.reshard()

    def words(self) -> str:
        """For the notes: `fsdp: 12 blocks (Block) and the rest, resharded after the forward`"""
        kinds = Counter(type(block).__name__.removeprefix("FSDP") for block in self.blocks.values())
        blocks = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        after = "resharded after the forward" if self.options.reshard_after_forward else "kept until the backward"
        copies = self.world // self.among
        what = f"hsdp: {copies} copies, each over {self.among} ranks; " if copies > 1 else "fsdp: "
        kept = "reduced once, whole until then" if self.options.accumulate == "keep" else "reduced per microbatch"
        return f"{what}{blocks + ' and the rest' if blocks else 'the model as one block'}, {after}; gradients {kept}"


class WholeNumbers(TorchDispatchMode):
    """A number that is read from a DTensor (`.item()`, float()) is the whole tensor's: torch gives this rank's part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor):
            args = (args[0].full_tensor(),)
        return func(*args, **(kwargs or {}))


def refuse_mixed(error: Exception) -> None:
    """Words for a backward or a metric that meets a parameter, or its gradient, outside of its block."""
    # The second: a graph holds on to a gathered parameter whose memory was given back after its block.
    if any(words in str(error) for words in ("mixed torch.Tensor and DTensor", "out of bounds for storage of size 0")):
        raise ModelError(
            "loss_fn computes with parameters themselves, or with a gradient's gradient: fsdp and hsdp have whole "
            "parameters only while their block runs.",
            evidence=[str(error).splitlines()[0]],
            fix=[
                "a penalty on parameters: the optimizer's weight_decay; a metric of them: outside of loss_fn",
                'strategy="ddp", which keeps whole parameters on every rank',
            ],
        ) from error


def _prepare(parameter: Parameter, device: torch.device) -> None:
    """Rank 0's value, on the device, contiguous (FSDP takes no other layout)."""
    if parameter.is_meta:
        return
    parameter.data = parameter.data.to(device).contiguous()
    dist.broadcast(parameter.data, 0)


def _refuse_call(models: Module, *args: Any) -> NoReturn:
    raise ModelError(f"a {type(models).__name__} has no forward.", fix=["call one of the models in it"])


def _resets_above(model: Module, blocks: Mapping[str, Module]) -> bool:
    """Whether some module that holds a block makes the block's values too, in a reset of its own."""
    names = {name.rpartition(".")[0] for name in blocks}
    above = {".".join(name.split(".")[:n]) for name in names for n in range(name.count(".") + 2)} | {""}
    holders = [model.get_submodule(name) for name in above]
    return any(hasattr(one, "reset_parameters") or hasattr(one, "_reset_parameters") for one in holders)


# ------------------------------------------------------------------------------------------------ before it is sharded


def check_fsdp(
    optimizers: Mapping[str, Any],
    options: Options,
    precision: Precision,
    *,
    exact: bool,
    compile: bool,
    world_size: int,
) -> None:
    """Refuse what fsdp and hsdp cannot do, before anything is sharded."""
    ranks, among = options.reshard_after_forward, options.shard_ranks or world_size
    if among < 1 or world_size % among:
        fix = [
            "as many ranks as hold one copy of the model together: a divisor of the world size",
            'strategy="fsdp"',
        ]
        raise UsageError(f'fsdp["shard_ranks"]={among} does not divide the {world_size} ranks.', fix=fix)
    if not isinstance(ranks, bool) and (ranks < 1 or among % ranks):
        what = f'fsdp["reshard_after_forward"]={ranks} does not divide the {among} ranks.'
        raise UsageError(what, fix=["True (over all ranks), False (not at all), or a divisor of their number"])
    if exact and among < world_size:
        what = 'exact=True with strategy="hsdp": an all-reduce adds up the copies of the model, in no fixed order.'
        raise UsageError(what, fix=['strategy="fsdp", which keeps the order', "or exact=False"])
    if compile and exact:
        raise UsageError(
            'exact=True with compile=True and strategy="fsdp": blocks are compiled one by one, and on one process the '
            "model as a whole, with other last bits.",
            fix=["compile=False", 'strategy="ddp"', "or exact=False"],
        )
    if exact and precision.by_part and precision.compute is not None:
        what = "exact=True: parameters gathered in half precision give other bits than the same model on one process."
        fix = [f'precision="{precision.name}": gathered in fp32 and cast per operation, as everywhere']
        raise UsageError(what, fix=fix)
    for optimizer in optimizers.values():
        check_rowwise(optimizer)


def policy_of(precision: Precision, *, exact: bool) -> Any:
    """FSDP's precision policy: gradients are reduced in fp32 unless told otherwise; in exact mode in their own type."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    param = precision.compute if precision.by_part else None
    half = param is not None or precision.param is not None
    reduce = None if exact else precision.reduce or (torch.float32 if half else None)
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)


def sharded_with_twin(
    model: Module, options: Options, at: Place, twin: bool, seed: int, fill: Callable[[Shards], None] | None
) -> tuple[Shards, Shards | None]:
    """The model sharded, and a second one of the same form and values, for an average. On all ranks."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    second = copy.deepcopy(model, memo) if twin else None
    shards = Shards(model, options, at, fill, seed)
    if second is None:
        return shards, None

    def copied(other: Shards) -> None:
        with torch.no_grad():
            for name, one in shards.shards.items():
                other.shards[name].local.copy_(one.local)

    return shards, Shards(second, replace(options, blocks=tuple(shards.blocks)), at, copied)
