"""What a loader is seen to do with tensors that have no memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from fp8refit.live.slots import TensorMeta
from fp8refit.tracing.boxes import fault_of_cover, pieces_of
from fp8refit.tracing.records import Copy, Run
from fp8refit.tracing.trace import Trace, trace_loader


def copies_of(tensor: Tensor, into: Tensor, load) -> tuple[Copy, ...]:
    def load_all(tensors):
        for _, source in tensors:
            load(into, source)

    traced = trace_loader(load_all, {"weight": into}, {"source": TensorMeta.of(tensor)})
    assert not traced.objections
    assert not traced.computed
    return traced.copies


def replayed(copies: tuple[Copy, ...], tensor: Tensor, into: Tensor) -> Tensor:
    """What the copies do with values, element by element."""
    flat, found = tensor.reshape(-1), torch.full_like(into, -1).view(-1)
    for copy in copies:
        sizes = [run.size for run in copy.runs]
        read = flat.as_strided(sizes, [run.stride for run in copy.runs], copy.start)
        found.as_strided(sizes, [run.into for run in copy.runs], copy.into).copy_(read)
    return found.view(into.shape)


def interleaved(into, source):
    heads = source.view(4, 3, 8, 16).transpose(0, 1).reshape(96, 16)
    for part in range(3):
        into.narrow(0, 32 * part, 32).copy_(heads.narrow(0, 32 * part, 32))


def joined_twice(into, source):
    joined = torch.cat([source[:64], source[64:]]).to(torch.float64)
    into.copy_(torch.cat([joined[:32], joined[40:72], joined[88:]]))


LOADERS = {
    "whole": ((96, 16), (96, 16), lambda into, source: into.copy_(source)),
    "another dtype": ((96, 16), (96, 16), lambda into, source: into.copy_(source.to(torch.float32))),
    "rows and columns": ((48, 8), (96, 16), lambda into, source: into.copy_(source.narrow(0, 48, 48)[:, 8:])),
    "transposed": ((16, 96), (96, 16), lambda into, source: into.copy_(source.t())),
    "transposed and made dense": ((16, 96), (96, 16), lambda into, source: into.copy_(source.t().contiguous())),
    "heads in turns": ((96, 16), (96, 16), interleaved),
    "an expert of a stack": ((4, 8, 16), (4, 16, 8), lambda into, source: into[1].copy_(source[2].t())),
    "a dimension of one": ((96, 16), (96, 1, 16), lambda into, source: into.copy_(source.squeeze(1))),
    "chunks": ((2, 48, 8), (96, 16), lambda into, source: [into[0].copy_(c[:48]) for c in source.chunk(2, 1)[:1]]),
    "several times": ((192, 16), (96, 16), lambda into, source: into.copy_(source.repeat(2, 1))),
    "joined, cut and joined again": ((72, 16), (96, 16), joined_twice),
    "one element": ((3,), (), lambda into, source: into[1].copy_(source)),
}


@pytest.mark.parametrize("how", LOADERS)
def test_copies_do_with_values_what_the_loader_does(how):
    shape, full_shape, load = LOADERS[how]
    tensor = torch.arange(torch.Size(full_shape).numel(), dtype=torch.float32).view(full_shape)
    expected = torch.full(shape, -1.0)
    load(expected, tensor)
    found = copies_of(tensor, torch.empty(shape, device="meta"), load)
    assert torch.equal(replayed(found, tensor, expected), expected)


@pytest.mark.parametrize("how", LOADERS)
def test_boxes_of_copies_are_the_same(how):
    shape, full_shape, load = LOADERS[how]
    if "transposed" in how or "stack" in how:
        pytest.skip("no boxes whose dimensions are in one order")
    tensor = torch.arange(torch.Size(full_shape).numel(), dtype=torch.float32).view(full_shape)
    expected, found = torch.full(shape, -1.0), torch.full(shape, -1.0)
    load(expected, tensor)
    for copy in copies_of(tensor, torch.empty(shape, device="meta"), load):
        for boxes in pieces_of(copy, shape, full_shape):
            into = found[tuple(slice(start, start + size) for start, size in boxes.into)]
            into.copy_(tensor[tuple(slice(start, start + size) for start, size in boxes.read)].reshape(into.shape))
    assert torch.equal(found, expected)


def test_tensors_that_are_joined_are_copies_of_each():
    """As SGLang fuses the first projections of latent attention; rows of a rank cut the seam."""
    q, kv = torch.arange(32.0).view(8, 4), 100 + torch.arange(24.0).view(6, 4)
    into = torch.empty(10, 4, device="meta")

    def load(tensors):
        into.copy_(torch.cat([tensor for _, tensor in tensors]).narrow(0, 3, 10))

    traced = trace_loader(load, {"w": into}, {"q": TensorMeta.of(q), "kv": TensorMeta.of(kv)})
    assert not traced.computed
    found = torch.zeros(10, 4)
    for copy in traced.copies:
        source = {"q": q, "kv": kv}[copy.source]
        found.view(-1)[copy.into : copy.into + copy.runs[0].size] = source.reshape(-1)[copy.start :][
            : copy.runs[0].size
        ]
    assert torch.equal(found, torch.cat([q, kv])[3:13])


def test_nothing_is_written():
    into = torch.full((4,), 7.0)
    trace_loader(lambda ts: [into.copy_(t) for _, t in ts], {"w": into}, {"s": TensorMeta.of(torch.empty(4))})
    assert into.tolist() == [7.0] * 4


def test_what_is_set_to_zero_is_noted():
    into = torch.empty(8, 4, device="meta")

    def load(tensors):
        for _, tensor in tensors:
            into[:5].copy_(tensor)
            into[5:].fill_(0)

    traced = trace_loader(load, {"w": into}, {"s": TensorMeta(shape=(5, 4), dtype=torch.bfloat16)})
    assert [(copy.source, copy.into, copy.runs) for copy in traced.copies] == [
        ("s", 0, (Run(size=20, into=1, stride=1),)),
        ("", 20, (Run(size=12, into=1, stride=0),)),
    ]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_that_is_read_as_a_number_is_copied_and_one_that_is_computed_with_is_not(shape):
    named = {name: torch.empty(shape, device="meta") for name in ("a", "b", "c")}

    def load(tensors):
        for name, tensor in tensors:
            named[name].data.fill_(tensor.item() * 2 if name == "c" else tensor.item())

    traced = trace_loader(load, named, dict.fromkeys(named, TensorMeta(shape=(1,), dtype=torch.bfloat16)))
    assert [(copy.parameter, copy.source, copy.start, copy.runs) for copy in traced.copies] == [
        ("a", "a", 0, ()),
        ("b", "b", 0, ()),
    ]
    assert [objection.source for objection in traced.objections] == ["c"]


@pytest.mark.parametrize("where", ["source", "parameter", "source in place", "parameter in place"])
def test_what_is_computed_can_be_computed_again(where):
    into = torch.empty(4, device="meta")

    def load(tensors):
        for _, tensor in tensors:
            if where == "source":
                into.copy_(-torch.exp(tensor.to(torch.float32)))
            elif where == "source in place":
                into.copy_(tensor.mul_(-1).exp_())
            elif where == "parameter in place":
                into.copy_(tensor)
                into.add_(1.0)
            else:
                into.copy_(tensor)
                into.copy_(1 + into)

    traced = trace_loader(load, {"w": into}, {"s": TensorMeta(shape=(4,), dtype=torch.bfloat16)})
    (computed,) = traced.computed
    (base,) = computed.value.base.bases()
    assert (base.name, base.is_parameter) == (("s", False) if where.startswith("source") else ("w", True))
    values = torch.tensor([0.0, 1.0, -2.0, 0.5])
    expected = {"source": -torch.exp(values), "source in place": torch.exp(-values)}.get(where, 1 + values)
    assert torch.equal(computed.value.of({base: values}), expected)


def test_every_name_that_ends_a_loader_is_told_and_the_others_are_traced():
    named = {"a": torch.empty(4, device="meta"), "c": torch.empty(4, device="meta")}

    def load(tensors):
        for name, tensor in tensors:
            named[name].copy_(tensor)

    meta = TensorMeta(shape=(4,), dtype=torch.bfloat16)
    traced = trace_loader(load, named, dict.fromkeys("abcd", meta))
    assert [copy.source for copy in traced.copies] == ["a", "c"]
    assert [(o.source, o.reason) for o in traced.objections] == [
        (name, f"is not taken by the model's loader (KeyError: '{name}')") for name in "bd"
    ]


def test_a_change_of_a_part_is_no_copy():
    into = torch.empty(4, device="meta")

    def load(tensors):
        for _, tensor in tensors:
            tensor[1:].mul_(2)
            into.copy_(tensor)
            into[1:].fill_(3)

    traced = trace_loader(load, {"w": into}, {"s": TensorMeta(shape=(4,), dtype=torch.bfloat16)})
    assert not traced.copies
    assert ["cannot be computed again" in o.reason or "is changed by" in o.reason for o in traced.objections] == [
        True
    ] * 2


def test_a_tensor_that_is_computed_with_as_a_number_is_not_taken():
    into = torch.empty(4, device="meta")
    metas = {"s": TensorMeta(shape=(1,), dtype=torch.bfloat16), "w": TensorMeta(shape=(4,), dtype=torch.bfloat16)}

    def load(tensors):
        scale = None
        for name, tensor in tensors:
            if name == "s":
                scale = tensor.item()
            else:
                into.copy_(tensor * scale)

    traced = trace_loader(load, {"w": into}, metas)
    assert not traced.copies
    assert not traced.computed
    assert [objection.source for objection in traced.objections] == ["s", "w"]


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([((0, 4), (0, 16)), ((4, 4), (0, 16))], None),
        ([((0, 4), (0, 16)), ((3, 5), (0, 16))], "16 of its 128 elements are loaded twice"),
        ([((0, 4), (0, 16)), ((4, 4), (0, 15))], "4 of its 128 elements are not loaded from any checkpoint tensor"),
        ([], "128 of its 128 elements are not loaded from any checkpoint tensor"),
    ],
)
def test_every_element_is_loaded_once(boxes, fault):
    assert fault_of_cover(boxes, (8, 16)) == fault


def test_what_threads_copy_is_seen():
    """Those that a loader starts, and those that they start."""
    into = {name: torch.empty(4, 2, device="meta") for name in ("left", "right")}

    def copy_both(source):
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: into[name].copy_(source), into))

    def load(tensors):
        for _, source in tensors:
            thread = threading.Thread(target=copy_both, args=(source,))
            thread.start()
            thread.join()

    traced = trace_loader(load, into, {"source": TensorMeta(shape=(4, 2), dtype=torch.bfloat16)})
    assert {copy.parameter for copy in traced.copies} == {"left", "right"}
    assert not traced.objections


def test_a_thread_that_fails_is_an_objection():
    def load(tensors):
        for _, source in tensors:
            thread = threading.Thread(target=source.view, args=(torch.int8,))
            thread.start()
            thread.join()

    traced = trace_loader(load, {}, {"source": TensorMeta(shape=(4, 2), dtype=torch.bfloat16)})
    assert [(each.source, "TypeError" in each.reason) for each in traced.objections] == [("source", True)]


def test_other_threads_and_later_work_are_not_watched():
    """A pool that a loader keeps computes with real tensors afterwards; another thread does so meanwhile."""
    pool, weight, real = ThreadPoolExecutor(1), torch.empty(2, device="meta"), torch.zeros(2)
    begin, begun = threading.Event(), threading.Event()

    def work_beside():
        begin.wait()
        inner = threading.Thread(target=real.add_, args=(1,))
        inner.start()
        inner.join()
        begun.set()

    beside = threading.Thread(target=work_beside)
    beside.start()

    def load(tensors):
        begin.set()
        begun.wait()
        for _, source in tensors:
            pool.submit(weight.copy_, source).result()

    try:
        traced = trace_loader(
            load, {"weight": weight, "real": real}, {"source": TensorMeta(shape=(2,), dtype=torch.bfloat16)}
        )
        assert [copy.parameter for copy in traced.copies] == ["weight"]
        assert not traced.computed
        assert real.tolist() == [1, 1]
        assert pool.submit(real.add_, 1).result().tolist() == [2, 2]
    finally:
        pool.shutdown()
        beside.join()
    assert threading.Thread.start.__module__ == "threading"


def test_zeros_that_a_loader_joins_with_a_tensor_are_zeros():
    def load(into, source):
        into.copy_(torch.cat([torch.zeros_like(source), source]).clone())

    zeros, copied = copies_of(torch.empty(4, 8), torch.empty(8, 8, device="meta"), load)
    assert (zeros.source, zeros.into, zeros.runs) == ("", 0, (Run(size=32, into=1, stride=0),))
    assert (copied.source, copied.into, copied.start, copied.runs) == (
        "source",
        32,
        0,
        (Run(size=32, into=1, stride=1),),
    )


@pytest.mark.parametrize("write", [lambda zeros: zeros.add_(1), lambda zeros: zeros[:1].fill_(2)], ids=["all", "a row"])
def test_what_was_zeros_is_none_once_a_loader_has_written_it(write):
    def load(tensors):
        for _, source in tensors:
            zeros = torch.zeros_like(source)
            write(zeros)
            into.copy_(zeros)

    into = torch.empty(4, 8, device="meta")
    traced = trace_loader(load, {"weight": into}, {"source": TensorMeta.of(torch.empty(4, 8))})
    assert traced.copies == ()
    assert traced.objections or traced.computed


def test_tensors_in_one_storage_are_told_apart():
    storage, into = torch.empty(6, 8), torch.empty(5, 8, device="meta")
    trace = Trace({"weight": into})
    for name, rows in (("a", storage[:2]), ("b", storage[2:])):
        trace.note(name, rows)
    with trace:
        into.copy_(storage[1:])
    assert [(copy.source, copy.into, copy.start) for copy in trace.copies] == [("a", 0, 8), ("b", 8, 0)]
