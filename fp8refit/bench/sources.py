"""fp8refit's other ways to give an engine a policy, beside `refit` of CUDA tensors that stay where they are."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8refit.bench.engine import BenchEngine, Loads, Strategy
from fp8refit.bench.policies import in_buckets, stacked
from fp8refit.config import Options
from fp8refit.driver.broadcaster import Broadcaster
from fp8refit.driver.refitter import Refitter
from fp8refit.driver.update import update
from fp8refit.training.peft import merged

Policy = Mapping[str, Tensor]
LORA_RANK = 64


class Sources:
    """The ways, each of which is made when it is first used.

    Args:
        engine: A live engine.
        refitter: Its refitter.
        options: Those of the refitter.
        device: Where policies are.
    """

    def __init__(self, engine: BenchEngine, refitter: Refitter, options: Options, device: torch.device) -> None:
        self._engine, self._refitter, self._options, self._device = engine, refitter, options, device
        self._made: dict[str, Any] = {}

    def ways(self, names: Policy) -> Iterator[Strategy]:
        """Yield those that are possible.

        Args:
            names: A policy.
        """
        refit = self._refitter.refit
        yield _way("generator", "a generator of names and tensors", lambda policy: refit(iter(policy.items())))
        yield _way(
            "function", "a function that returns such a generator", lambda policy: refit(lambda: iter(policy.items()))
        )
        yield _way("changes-counted", "tensors at rest, with `count_changes=True`", self._count)
        yield _way("verify", "`verify` of tensors at rest: nothing is written", self._verify, refit)
        yield _way(
            "new-memory",
            "tensors in other memory than those before",
            lambda _: refit(self._made["new-memory"]),
            self._copy_elsewhere,
            num_untimed=0,
        )
        yield self._from_host("cpu", "CPU tensors", torch.empty_like)
        if self._device.type == "cuda":
            yield self._from_host("pinned", "pinned CPU tensors", partial(torch.empty_like, pin_memory=True))
        if stacked(names).keys() != names.keys():
            yield _way("stacked", "tensors at rest, experts stacked", lambda policy: refit(self._stack(policy)))
        elif not any("experts" in name for name in names):
            for name, what, dtype in (("lora", "", None), ("lora-fp32", " of float32", torch.float32)):
                yield _way(
                    name,
                    f"a merged LoRA of rank {LORA_RANK}{what}: another policy than the others'",
                    partial(self._merge, name, dtype),
                    loads=Loads.OTHER,
                )
        if self._engine.worker is not None:
            for name, num_bytes in (("512mib", 512 << 20), ("2gib", 2 << 30)):
                yield _way(
                    f"update-{name}",
                    f"`update` in buckets of {num_bytes >> 20} MiB",
                    lambda _: self._update(self._made["buckets"]),
                    partial(self._pack, num_bytes),
                )
            yield _way(
                "update-tensors",
                "`update`, tensor by tensor",
                lambda policy: self._update([item] for item in policy.items()),
            )
            yield _way(
                "update-generator", "`update` by one generator", lambda policy: self._update([iter(policy.items())])
            )
        else:
            pushes: dict[str, tuple[str, Options]] = {
                "broadcast": ("FP8 on the wire", {}),
                "broadcast-1gib": ("FP8 on the wire, in buckets of 1 GiB", {"bucket_bytes": 1 << 30}),
                "broadcast-bf16": ("BF16 on the wire", {"collective": {"wire": "bf16"}}),
            }
            for name, (how, options) in pushes.items():
                yield _way(name, f"`Broadcaster.push`, {how}", partial(self._broadcast, name, options=options))

    def close(self) -> None:
        """Leave what was joined."""
        for made in self._made.values():
            if isinstance(made, Refitter | Broadcaster):
                made.close()

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _verify(self, policy: Policy) -> None:
        self._refitter.verify(policy).raise_if_different()

    def _count(self, policy: Policy) -> object:
        options: Options = {**self._options, "count_changes": True}
        return self._once("counting", lambda: Refitter(self._engine.candidate, **options)).refit(policy)

    def _broadcast(self, name: str, policy: Policy, options: Options) -> object:
        with_these: Options = {**self._options, **options}
        return self._once(name, lambda: Broadcaster([self._engine.candidate], **with_these)).push(policy)

    def _update(self, buckets: Any) -> object:
        with update(self._engine.worker) as begun:
            for bucket in buckets:
                begun.load(bucket)
        return begun.report

    def _pack(self, num_bytes: int, policy: Policy) -> None:
        self._made["buckets"] = list(in_buckets(policy.items(), num_bytes))

    def _copy_elsewhere(self, policy: Policy) -> None:
        self._refitter.refit(policy)
        self._copy("new-memory", torch.empty_like, policy)

    def _copy(self, name: str, empty: Callable[..., Tensor], policy: Policy, device: str | None = None) -> None:
        """Into memory that stays where it is."""
        copies = self._once(name, lambda: {key: empty(tensor, device=device) for key, tensor in policy.items()})
        for key, tensor in policy.items():
            copies[key].copy_(tensor)

    def _stack(self, policy: Policy) -> Policy:
        return self._once("stacked", lambda: stacked(policy))  # type: ignore[no-any-return]

    def _from_host(self, name: str, what: str, empty: Callable[..., Tensor]) -> Strategy:
        return _way(
            name,
            what,
            lambda _: self._refitter.refit(self._made[name]),
            partial(self._copy, name, empty, device="cpu"),
            num_untimed=0,
        )

    def _merge(self, name: str, dtype: torch.dtype | None, policy: Policy) -> object:
        """The modules are the same for each policy, whose tensors stay where they are."""
        return self._refitter.refit(merged(self._once(name, lambda: lora_over(policy, dtype))))


def _way(
    name: str,
    summary: str,
    update: Callable[[Policy], object],
    prepare: Callable[[Policy], object] = lambda _: None,
    *,
    num_untimed: int = 3,
    loads: Loads = Loads.POLICY,
) -> Strategy:
    return Strategy(
        name=name,
        summary=summary,
        update=update,
        prepare=prepare,
        loads=loads,
        is_on_request=True,
        num_untimed=num_untimed,
    )


class _LoraLayer(nn.Module):
    """A linear layer with an adapter, as `peft` has it."""

    disable_adapters = False
    merged_adapters = ()
    active_adapters = ("default",)

    def __init__(self, base: nn.Linear, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = {"default": 0.5}
        rows, columns = base.weight.shape
        device, dtype = base.weight.device, dtype or base.weight.dtype
        for part, num_inputs, num_outputs in (("lora_A", columns, LORA_RANK), ("lora_B", LORA_RANK, rows)):
            layer = nn.Linear(num_inputs, num_outputs, bias=False, device=device, dtype=dtype)
            setattr(self, part, nn.ModuleDict({"default": layer}))


def lora_over(policy: Policy, dtype: torch.dtype | None = None) -> nn.Module:
    """Return modules such as `peft` makes, around the projections of a policy.

    Args:
        policy: Checkpoint names and tensors, which the modules share.
        dtype: Of the adapters; None for that of each weight.
    """
    root = nn.Module()
    for name, tensor in policy.items():
        *path, leaf, key = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        is_matrix = tensor.ndim == 2 and leaf.endswith("_proj")
        if leaf not in dict(module.named_children()):
            child: nn.Module = nn.Linear(1, 1, bias=False, device="meta") if is_matrix else nn.Module()
            setattr(child, key, nn.Parameter(tensor, requires_grad=False))
            module.add_module(leaf, _LoraLayer(child, dtype) if isinstance(child, nn.Linear) else child)
        else:
            child = module.get_submodule(leaf)
            setattr(getattr(child, "base_layer", child), key, nn.Parameter(tensor, requires_grad=False))
    return root
