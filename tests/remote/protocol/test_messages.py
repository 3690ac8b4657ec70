"""The language of drivers and ranks: JSON that comes out as it went in, and nothing else."""

import json
from typing import get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from fp8refit.config import Job, KvOrder, RefitConfig
from fp8refit.errors import InvalidSourceError
from fp8refit.live.formats import BlockFormat, ScaleFormat
from fp8refit.live.layout import EngineLayout
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import Do, Reply, Request, have_done
from fp8refit.report import RankReport
from fp8refit.transport.collective.buckets import Cut, WireTensor
from fp8refit.transport.collective.communicator import Meeting
from fp8refit.transport.memory.process import Process
from fp8refit.transport.memory.segment import Segment, TensorRef
from fp8refit.transport.stamps import FileStamp
from fp8refit.transport.vote import ErrorRecord
from tests.fakes import make_target

SEGMENT = Segment(
    id="cuda-1-2-GPU-3-4",
    kind="cuda_ipc",
    num_bytes=4096,
    handle="ab" * 64,
    device="GPU-3",
    process=Process(pid=1, started=2, pid_namespace="pid:[3]"),
    address=1 << 46,
    buffer_id=4,
)
REF = TensorRef(name="w", segment=SEGMENT.id, offset_bytes=256, shape=(2, 3), stride=(3, 1), dtype="bfloat16")
POWERS_OF_TWO = BlockFormat(scale_format=ScaleFormat.UE8M0)
CODES = WireTensor(name="w", shape=(256, 130), dtype="float8_e4m3fn", format=POWERS_OF_TWO, row_step=128)
CUT = CODES.model_copy(update={"cut": Cut(dim=0, spans=((0, 128), (128, 128)))})
VALUES = WireTensor(name="s", shape=(), dtype="float32", travels=False)
MEETING = Meeting(token="0" * 32, host="127.0.0.1", port=1, size=3, backend="gloo", sections=(1, 0))
CONFIG = RefitConfig(validate="strict", fp32_sources="exact", on_scale_mismatch="copy", timeout_s=1.5, in_flight="keep")
SOURCES = [
    messages.MappedTensors(digest="d", segments=(SEGMENT,), refs=(REF,), problems=("w: sent twice",)),
    messages.MappedTensors(digest="d", refs=()),
    messages.MappedTensors(digest="d"),
    messages.Files(
        path="/a b/ä.safetensors",
        stamps=(FileStamp(name="ä.safetensors", num_bytes=9, mtime_ns=1 << 60, header="ab", inode=3, boot="c"),),
    ),
    messages.Pushed(manifest=None),
    messages.Pushed(manifest={}),
    messages.Pushed(manifest={"w": ((2, 3), "bfloat16"), "s": ((), "float32")}, problems=("p",), odd_scales=("s",)),
    messages.Broadcast(token="t", digest="d", tensors=None),
    messages.Broadcast(
        token="t", digest="d", tensors=(CODES, VALUES), bucket_bytes=1 << 20, num_buckets=1, unfit={"k": "0"}
    ),
    messages.Broadcast(token="t", digest="d", tensors=(CUT, VALUES), sections=(0, 1, 0, 1)),
]
ORDERS = [
    messages.Do(step="hello"),
    *(messages.Prepare(refit="r", job=Job(config=CONFIG), source=source) for source in SOURCES),
    messages.RefitStep(step="begin", refit="r"),
    messages.Stream(refit="r", ring=SEGMENT),
    messages.RefitStep(step="write", refit="r"),
    messages.RefitStep(step="finish", refit="r"),
    messages.Join(meeting=MEETING, first_rank=1, timeout_s=2.5),
    messages.Take(refit="r", version=4),
    messages.Calibrate(step="check_calibration", job=Job(config=CONFIG, kv=KvOrder(scales={"a.k_scale": 0.5}))),
    messages.Calibrate(job=Job(config=CONFIG, kv=KvOrder(token_ids=((1, 2), (3,))))),
    messages.RefitStep(step="abandon", refit="r"),
    messages.Do(step="read"),
    messages.Do(step="describe"),
    messages.Do(step="fingerprint"),
    messages.Do(step="close"),
]


def of_order(order) -> str:
    return getattr(getattr(order, "source", None), "kind", order.step)


@pytest.mark.parametrize("order", ORDERS, ids=of_order)
def test_a_request_comes_out_of_json_as_it_went_in(order):
    request = Request(id="7", order=order)
    again = Request.model_validate_json(request.encode())
    assert again == request
    assert type(again.order) is type(order)
    assert again.protocol == messages.PROTOCOL


def test_every_order_is_tried_here():
    steps = {step for order in get_args(messages.Order) for step in get_args(order.model_fields["step"].annotation)}
    assert {order.step for order in ORDERS} == steps


def test_nothing_to_map_is_told_from_the_tensors_of_the_last_refit():
    adapter = TypeAdapter(messages.MappedTensors)
    nothing, last = (adapter.validate_json(source.encode()) for source in SOURCES[1:3])
    assert (nothing.refs, last.refs) == ((), None)


@pytest.mark.parametrize("order", ORDERS, ids=of_order)
def test_a_field_that_nobody_knows_is_refused(order):
    request = json.loads(Request(id="7", order=order).encode())
    for changed in (request | {"more": 1}, request | {"order": request["order"] | {"more": 1}}):
        with pytest.raises(ValidationError, match="more"):
            Request.model_validate_json(json.dumps(changed))


@pytest.mark.parametrize("step", ["dance", "", None, 1])
def test_a_step_that_nobody_knows_is_refused(step):
    with pytest.raises(ValidationError, match=r"step|tag"):
        Request.model_validate_json(json.dumps({"id": "7", "order": {"step": step, "refit": "r"}}))


@pytest.mark.parametrize("sections", [(), (0,), (0, 2), (-1, 0), (1 << 16, 0)])
def test_an_offer_cuts_tensors_for_the_sections_that_there_are(sections):
    with pytest.raises(ValidationError):
        messages.Broadcast(token="t", digest="d", tensors=(CUT,), sections=sections)


def test_messages_are_not_changed():
    with pytest.raises(ValidationError, match="frozen"):
        ORDERS[-1].step = "hello"


def test_a_reply_comes_out_of_json_as_it_went_in(model):
    report = RankReport(
        rank=1,
        device="cuda:1",
        num_tensors=3,
        ignored=("lm_head.weight",),
        bytes_read=1 << 40,
        bytes_written=2,
        fill_s=1e-9,
        verify_s=0.1,
        fill_device_s=1 / 3,
        source_digest="d",
    )
    layout = make_target(model).live.layout()
    error = ErrorRecord.of(InvalidSourceError(["w: missing"], written=True))
    reply = Reply(id="7", rank=1, error=error, version=3, is_dirty=True, reports=(report, report), layout=layout)
    again = Reply.model_validate_json(reply.encode())
    assert again == reply
    assert isinstance(again.layout, EngineLayout)


@pytest.mark.parametrize("answers", [[], ["rubbish"], [None]])
def test_nothing_is_done_that_nobody_says_is_done(answers):
    assert have_done(answers, Request(id="a", order=Do(step="hello")).encode()) == []


def test_what_cannot_be_read_is_not_done():
    assert have_done([Reply(id="").encode()], "rubbish") == []
