"""Watches a loader copy checkpoint tensors into parameters, using meta tensors only, and records which box goes where.

A view of a meta tensor has a storage, offset, sizes and strides like any other, so each `copy_` into a parameter shows
where its values come from. Reordering copies (`transpose().reshape()`) are followed through; operations that compute new
values are recorded as such.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from math import prod
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.patterns import Mode, NoPatternError, Origin, copy_of, nothing_into, origin_of, row_major
from fp8refit.tracing.records import CLONES, Base, Computed, Copy, Objection, Recipe, Traced, View

aten = torch.ops.aten

T = TypeVar("T")
Load: TypeAlias = Callable[[Iterator[tuple[str, Tensor]]], object]
"""A model's `load_weights`."""
_ONE_AT_A_TIME = threading.RLock()
"""Held by whoever replaces how threads start."""
_UNLIKELY = 73856093.1416
"""A number that no loader fills a parameter with by chance."""
_HOLD_BF16 = (torch.bfloat16, torch.float32, torch.float64)
_SHAPED_LIKE = frozenset(
    {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, records writes to parameters without carrying them out.

    Args:
        parameters: Parameters by name. A shared storage goes by its first name.
    """

    def __init__(self, parameters: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters: dict[int, str] = {}
        for name, tensor in (parameters or {}).items():
            self._parameters.setdefault(storage_of(tensor), name)
        self._origins: dict[int, Origin] = {}
        self._joined: dict[int, list[tuple[range, Origin]]] = {}
        """Storages made of ranges from several checkpoint tensors, one after another. Zeros have an origin without a name."""
        self._recipes: dict[int, Recipe | None] = {}
        self._numbers: dict[float, Tensor] = {}
        self._stand_ins = count(1)
        self._alive: list[Tensor] = [*(parameters or {}).values()]  # so that no other storage gets the address of one
        self.copies: list[Copy] = []
        self.computed: list[Computed] = []
        self.objections: list[Objection] = []
        self.casts: set[tuple[str, torch.dtype]] = set()
        self._is_over = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and keeping dynamo out costs as much as an operation

    def source(self, name: str, meta: TensorMeta) -> Tensor:
        """Return a meta tensor that stands for the checkpoint tensor `name`."""
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        self.note(name, tensor)
        return tensor

    def note(self, name: str, tensor: Tensor) -> None:
        """Let the dense, row-major `tensor` stand for the checkpoint tensor `name`, or for zeros that have none.

        Others in the same storage may stand for others.
        """
        self._alive.append(tensor)
        self._recipes[storage_of(tensor)] = None
        dims = zip(tensor.shape, tensor.stride(), tensor.stride(), strict=True)
        origin = Origin.of(name, 0, (Mode(n, here, there if name else 0) for n, here, there in dims if n != 1))
        if _is_dense(tensor):
            self._origins[storage_of(tensor)] = origin
        else:
            start = int(tensor.storage_offset())
            self._joined.setdefault(storage_of(tensor), []).append((range(start, start + tensor.numel()), origin))

    def places_of(self, tensor: Tensor) -> list[Copy]:
        """Describe where the elements of `tensor` come from, as copies into a row-major tensor; none if that is not known."""
        try:
            return self._placed(tensor)
        except (KeyError, NoPatternError):
            return []

    def _placed(self, tensor: Tensor) -> list[Copy]:
        """See `places_of`.

        Raises:
            KeyError: It does not come from checkpoint tensors.
            NoPatternError: Their elements are in no regular pattern.
        """
        storage = storage_of(tensor)
        if storage not in self._joined:
            return [copy_of("", 0, row_major(tensor.shape), self._origins[storage], tensor)]
        into = torch.empty(tensor.shape, device="meta")
        return self._copies_of_joined("", into, tensor, self._joined[storage])

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Record what an operation does with known tensors.

        Raises:
            TypeError: A tensor is viewed as elements of another size, so strides do not say what is read.
        """
        if self._is_over:  # in a thread that has outlived the loader
            return func(*args, **(kwargs or {}))
        if func is aten.view.dtype and args[1].itemsize != args[0].itemsize:
            raise TypeError(f"views {args[0].dtype} as {args[1]}")
        if _only_views(func):
            # What calling `func` does, in half the time.
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        if func is aten.copy_.default and (name := self._parameters.get(storage_of(args[0]))) is not None:
            if args[0].numel():
                self._copy(name, args[0], args[1])
            return args[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is aten._local_scalar_dense.default and storage_of(args[0]) in self._origins:
            return self._number_for(args[0])
        writes = func._schema.is_mutable
        if writes and (into := [t for t in _written(func, args, kwargs or {}) if storage_of(t) in self._parameters]):
            if len(into) == 1 and into[0] is tensors[0]:
                self._write(func, into[0], args, kwargs or {})
            else:
                for tensor in into:
                    self._object(self._parameters[storage_of(tensor)], f"is changed by {func} when it is loaded")
            return into[0] if func._schema.returns else None
        out = func(*args, **(kwargs or {}))
        read = [storage_of(tensor) for tensor in tensors]
        if any(storage in self._recipes or storage in self._parameters for storage in read):
            for made in tree_leaves(out):
                if isinstance(made, Tensor) and (writes or storage_of(made) not in read) and func not in _SHAPED_LIKE:
                    self._follow(func, args, kwargs or {}, tensors[0], made, is_only=made is out)
            if func is aten.zeros_like.default:
                self.note("", out)
        return out

    def _write(self, func: Any, into: Tensor, args: tuple[Any, ...], kwargs: Any) -> None:
        name = self._parameters[storage_of(into)]
        if not into.numel():
            return
        if func is aten.fill_.Scalar and args[1] in self._numbers:
            self._copy(name, into, self._numbers.pop(args[1]))
        elif func is aten.zero_.default or (func is aten.fill_.Scalar and args[1] == 0):
            self.copies.append(nothing_into(name, into))
        elif (recipe := self._recipe_of(func, args, kwargs, into)) is not None:
            self._compute(name, into, View(base=recipe, size=recipe.size, stride=recipe.stride, offset=0))
        else:
            self._object(name, f"is changed by {func} when it is loaded")

    def _number_for(self, tensor: Tensor) -> float:
        """Return a stand-in for the number that a loader reads from a tensor. It is recognized if the loader writes it."""
        number = _UNLIKELY + next(self._stand_ins)
        self._numbers[number] = tensor.as_strided((), ())
        return number

    def check_numbers(self) -> None:
        """Check that every number that a loader read was also written.

        Raises:
            ValueError: One was not, so it may have been used in a computation.
        """
        if self._numbers:
            raise ValueError("a tensor is computed with as a number")

    def _copy(self, name: str, into: Tensor, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        origin, recipe = self._origins.get(storage), self._recipes.get(storage)
        if origin is not None and not origin.source:
            self.copies.append(nothing_into(name, into))
            return
        if origin is not None:
            try:
                places = copy_of(name, int(into.storage_offset()), into.stride(), origin, tensor.expand(into.shape))
            except NoPatternError:
                pass
            else:
                self.copies.append(places)
                return
        if storage in self._joined:
            with suppress(NoPatternError):
                self.copies += self._copies_of_joined(name, into, tensor, self._joined[storage])
                return
        if recipe is None and (origin is not None or storage in self._parameters):
            view = self._viewed(tensor.expand(into.shape))
            size = tuple(into.shape)
            recipe = Recipe(func=aten.clone.default, args=(view,), kwargs={}, size=size, stride=row_major(size))
            self._compute(name, into, View(base=recipe, size=size, stride=recipe.stride, offset=0))
        elif recipe is None:
            self._object(name, "is loaded from what cannot be computed again")
        else:
            self._compute(name, into, _view_of(recipe, tensor.expand(into.shape)))

    def _compute(self, name: str, into: Tensor, value: View) -> None:
        self.computed.append(Computed(parameter=name, into=nothing_into(name, into), value=value))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread, and threads that are started meanwhile by a thread that is watched.

        Raises:
            Exception: Whatever has ended such a thread.
        """
        watched, errors = {threading.get_ident()}, list[Exception]()

        def run(work: Callable[[], None]) -> None:
            watched.add(threading.get_ident())
            try:
                with torch.no_grad(), self:
                    work()
            except Exception as error:  # noqa: BLE001 - a loader may raise anything, and a thread keeps it to itself
                errors.append(error)
            finally:
                watched.discard(threading.get_ident())

        def start(thread: threading.Thread) -> None:
            if threading.get_ident() in watched:
                thread.run = partial(run, thread.run)  # type: ignore[method-assign]
            started(thread)

        with _ONE_AT_A_TIME:
            started = threading.Thread.start
            threading.Thread.start = start  # type: ignore[assignment, method-assign]
            try:
                with torch.no_grad(), self:
                    yield
            finally:
                threading.Thread.start = started  # type: ignore[method-assign]
                self._is_over = True
        for error in errors:
            raise error

    @staticmethod
    def _copies_of_joined(
        name: str, into: Tensor, tensor: Tensor, joined: Sequence[tuple[range, Origin]]
    ) -> list[Copy]:
        """Return, for each range of a storage, the copies of the tensor's rows in it.

        Raises:
            NoPatternError: A row spans several ranges.
        """
        if tensor.shape != into.shape or not tensor.ndim or not tensor.numel() or not tensor.stride(0):
            raise NoPatternError
        step, first = tensor.stride(0), int(tensor.storage_offset())
        row = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        copies, num_rows = [], 0
        for places, origin in joined:
            start = max(0, -(-(places.start - first) // step))
            end = min(tensor.shape[0], (places.stop - row - first) // step + 1)
            if start < end:
                part, box = tensor[start:end], into[start:end]
                offset = int(part.storage_offset()) - places.start
                copies.append(copy_of(name, int(box.storage_offset()), box.stride(), origin, part, offset))
                num_rows += end - start
        if num_rows != tensor.shape[0]:
            raise NoPatternError
        return copies

    def _object(self, parameter: str, reason: str) -> None:
        self.objections.append(Objection(source="", parameter=parameter, reason=reason))

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, read: Tensor, made: Tensor, *, is_only: bool
    ) -> None:
        """Record where the elements of a tensor made by `func` come from."""
        storage = storage_of(made)
        recipe = self._recipe_of(func, args, kwargs, made) if is_only else None
        origin = self._origins.get(storage_of(read))
        self._alive.append(made)
        self._origins.pop(storage, None)
        self._joined.pop(storage, None)
        self._recipes[storage] = recipe
        if func in CLONES and origin is not None and _is_dense(made):
            with suppress(NoPatternError):
                places = copy_of("", 0, made.stride(), origin, read)
                self._origins[storage] = origin_of(places)
        elif made.is_contiguous():
            with suppress(KeyError, NoPatternError):
                self._joined[storage] = self._join(_rows_joined(func, args))
        if func in CLONES and made.dtype not in _HOLD_BF16:
            found = (
                [self._origins[storage]] if storage in self._origins else [o for _, o in self._joined.get(storage, ())]
            )
            self.casts |= {(each.source, made.dtype) for each in found if each.source}

    def _recipe_of(self, func: Any, args: tuple[Any, ...], kwargs: Any, made: Tensor) -> Recipe | None:
        """Return the recipe for `made`, which `func` made or changed; None if it read something unknown."""
        is_parameter = storage_of(made) in self._parameters
        if func._schema.is_mutable:
            func = _apart(func)
            if func is None or not (is_parameter or _is_dense(made)):
                return None
        with suppress(KeyError):
            args, kwargs = tree_map_only(Tensor, self._viewed, (args, kwargs))
            stride = row_major(made.shape) if is_parameter else made.stride()
            return Recipe(func=func, args=args, kwargs=kwargs, size=tuple(made.shape), stride=stride)
        return None

    def _join(self, tensors: Sequence[Tensor]) -> list[tuple[range, Origin]]:
        """Return where each range of a storage comes from, if `tensors` are concatenated in it.

        Raises:
            KeyError: A tensor does not come from checkpoint tensors.
            NoPatternError: A tensor's order is not a regular pattern.
        """
        found, end = list[tuple[range, Origin]](), 0
        for tensor in tensors:
            for places in self._placed(tensor):
                start = end + places.into
                found.append((range(start, start + prod(run.size for run in places.runs)), origin_of(places)))
            end += tensor.numel()
        return found

    def _viewed(self, tensor: Tensor) -> View | Tensor:
        """Return what to read instead of a tensor when an operation is repeated.

        Raises:
            KeyError: It is made of something unknown.
        """
        storage = storage_of(tensor)
        if storage in self._parameters:
            return _view_of(Base(name=self._parameters[storage], is_parameter=True), tensor)
        recipe = self._recipes.get(storage)
        if recipe is not None:
            return _view_of(recipe, tensor)
        origin = self._origins.get(storage)
        if origin is not None and origin.source:
            return _view_of(Base(name=origin.source, is_parameter=False), tensor)
        if tensor.is_meta or (origin is None and storage in self._recipes):
            raise KeyError(storage)
        return tensor  # a constant


def trace_loader(load: Load, parameters: Mapping[str, Tensor], sources: Mapping[str, TensorMeta]) -> Traced:
    """Run `load` once on meta tensors of `sources`. If a tensor makes it fail, run it for each name separately.

    Args:
        load: A model's `load_weights`.
        parameters: That model's parameters and buffers, by name. None is written.
        sources: The checkpoint's tensors.
    """
    try:
        return trace_once(load, parameters, sources)
    except Exception:  # noqa: BLE001 - a loader may raise anything; the errors of all names are reported together
        found = [_trace_one(load, parameters, name, meta) for name, meta in sources.items()]
    return Traced(copies=()).with_all(found)


def _trace_one(load: Load, parameters: Mapping[str, Tensor], name: str, meta: TensorMeta) -> Traced:
    try:
        return trace_once(load, parameters, {name: meta})
    except Exception as error:  # noqa: BLE001 - as above
        reason = f"is not taken by the model's loader ({type(error).__name__}: {error})"
        return Traced(copies=(), objections=(Objection(source=name, parameter="", reason=reason),))


def trace_once(load: Load, parameters: Mapping[str, Tensor], sources: Mapping[str, TensorMeta]) -> Traced:
    """Trace the loader once, and raise what it raises."""
    trace = Trace(parameters)
    given = [(name, trace.source(name, meta)) for name, meta in sources.items()]
    with trace.watching():
        load(iter(given))
    trace.check_numbers()
    return Traced(
        copies=tuple(dict.fromkeys(trace.copies)),
        computed=tuple(trace.computed),
        objections=tuple(dict.fromkeys(trace.objections)),
        casts=frozenset(trace.casts),
    )


def by_operation(judge: Callable[[Any], T]) -> Callable[[Any], T]:
    """Cache what `judge` says about each of torch's operations, by identity, because hashing one takes long."""
    known: dict[int, tuple[T, Any]] = {}  # with the operation, so that no other one gets its address

    def judge_once(func: Any) -> T:
        found = known.get(id(func))
        if found is None:
            found = known[id(func)] = judge(func), func
        return found[0]

    return judge_once


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the inputs that an operation writes."""
    places, names = _written_arguments(func)
    found = [args[place] for place in places if place < len(args)], [kwargs[name] for name in names if name in kwargs]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _rows_joined(func: Any, args: tuple[Any, ...]) -> Sequence[Tensor]:
    """The tensors whose rows an operation puts one after another.

    Raises:
        KeyError: It does something else.
    """
    if func is aten.cat.default and (len(args) < 2 or args[1] == 0):
        return cast(Sequence[Tensor], args[0])
    if func in CLONES:
        return [args[0]]
    if func is aten.repeat.default and len(args[1]) == args[0].ndim and set(args[1][1:]) <= {1}:
        return [args[0]] * int(args[1][0])
    raise KeyError(func)


@by_operation
def _written_arguments(func: Any) -> tuple[list[int], list[str]]:
    """The places and names of the arguments that an operation writes."""
    written = [(place, each.name) for place, each in enumerate(func._schema.arguments) if each.is_write]
    return [place for place, _ in written], [name for _, name in written]


@by_operation
def _apart(func: Any) -> Any | None:
    """The out-of-place form of `func`, if it is arithmetic."""
    name: str = func._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name in ("fill_", "copy_", "zero_") or "generator" in str(func._schema):
        return None
    return getattr(getattr(aten, name[:-1], None), func._overloadname, None)


@by_operation
def _only_views(func: Any) -> bool:
    """Whether an operation only returns views of its inputs and writes nothing."""
    returns = func._schema.returns
    views = [found.alias_info is not None and not found.alias_info.is_write for found in returns]
    return bool(views) and all(views) and not func._schema.is_mutable


def _view_of(base: Recipe | Base, tensor: Tensor) -> View:
    """The place of `tensor` in the storage it is a view of."""
    return View(base=base, size=tuple(tensor.shape), stride=tensor.stride(), offset=int(tensor.storage_offset()))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == prod(tensor.shape) * tensor.element_size()


def storage_of(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage, unique among the storages that are alive."""
    return int(tensor.untyped_storage()._cdata)
