"""Orders as they are sent: what comes out is what was put in, and what is no order costs little."""

import json
import math
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fp8refit.config import LONGEST_WAIT_S, Job, KvOrder, RefitConfig
from fp8refit.errors import RankFailedError
from fp8refit.live.formats import BlockFormat
from fp8refit.remote.protocol import messages
from fp8refit.remote.protocol.messages import first_problem
from fp8refit.remote.servers import orders
from fp8refit.remote.servers.orders import Caller, OrderRequest
from fp8refit.transport.collective.buckets import Cut, WireTensor
from fp8refit.transport.memory.segment import TensorRef

DRIVER = Caller.new()
NUM_TENSORS = 18_867
"""Of a mixture of 128 experts in 48 layers."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
waits = st.floats(min_value=1e-3, max_value=1e9)
some_orders = st.one_of(
    st.builds(orders.Send, messages=st.tuples(texts), timeouts_s=st.tuples(waits)),
    st.builds(orders.Send, messages=st.tuples(texts, texts), timeouts_s=st.tuples(waits, waits)),
    st.builds(orders.Tokenize, prompts=st.lists(texts, max_size=5).map(tuple)),
    st.builds(orders.Refuse, reason=texts),
    st.builds(orders.Look, path=texts),
    st.builds(orders.Resume, version=st.none() | st.integers(0, (1 << 63) - 1)),
    st.builds(orders.Pause, config=st.builds(RefitConfig, timeout_s=st.floats(min_value=1e-3, max_value=86_400))),
    st.sampled_from([orders.Hello(), orders.Flush()]),
)


def sent(order) -> str:
    return OrderRequest(driver=DRIVER, order=order).encode()


def refused(message: str) -> str:
    with pytest.raises(RankFailedError, match="cannot read what the driver says; install the same version") as caught:
        OrderRequest.decode(message)
    return str(caught.value)


@given(some_orders)
def test_what_comes_out_is_what_was_put_in(order):
    assert OrderRequest.decode(sent(order)) == OrderRequest(driver=DRIVER, order=order)


@given(some_orders, st.data())
def test_an_order_that_is_cut_short_or_goes_on_is_none(order, data):
    message = sent(order)
    refused(message[: data.draw(st.integers(0, len(message) - 1))])
    refused(message + "x")


@pytest.mark.parametrize("length", ["-1", "1.0", "true", '"ab"', "null", "3", "1e400", "9" * 5000])
def test_a_text_is_as_long_as_it_says(length):
    message = sent(orders.Send(messages=("ab",), timeouts_s=(1.0,))).replace('"messages":[2]', f'"messages":[{length}]')
    refused(message)


# How long orders may be.


def named(index: int) -> str:
    return f"model.layers.{index // 400}.mlp.experts.{index % 128}.down_proj.weight_scale_inv"


def mapped() -> messages.MappedTensors:
    refs = [
        TensorRef(
            name=named(index),
            segment=32 * "a",
            offset_bytes=1 << 40,
            shape=(7168, 2048),
            stride=(2048, 1),
            dtype="float32",
        )
        for index in range(NUM_TENSORS)
    ]
    return messages.MappedTensors(digest=64 * "a", refs=tuple(refs))


def pushed() -> messages.Pushed:
    return messages.Pushed(manifest={named(index): ((7168, 2048), "bfloat16") for index in range(NUM_TENSORS)})


def broadcast() -> messages.Broadcast:
    """Cut for sixteen ranks."""
    cut = Cut(dim=1, spans=tuple((index * 128, 128) for index in range(16)))
    tensors = [
        WireTensor(
            name=named(index),
            shape=(7168, 2048),
            dtype="float8_e4m3fn",
            format=BlockFormat(),
            row_step=128,
            part_of=named(index),
            cut=cut,
        )
        for index in range(NUM_TENSORS)
    ]
    return messages.Broadcast(token=32 * "a", digest=64 * "a", tensors=tuple(tensors), sections=tuple(range(16)))


@pytest.mark.parametrize("source", [mapped, pushed, broadcast])
def test_the_longest_orders_fit(source):
    kv = KvOrder(token_ids=((151_000,) * 1024,) * 64)
    prepare = messages.Prepare(refit="a", job=Job(kv=kv), source=source())
    message = sent(orders.Send(messages=(messages.Request(id="1", order=prepare).encode(),), timeouts_s=(300.0,)))
    assert 4 * len(message) < 3 * orders.MAX_ORDER_BYTES
    tracemalloc.start()
    order = OrderRequest.decode(message).order
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order.messages[0]) > NUM_TENSORS
    assert peak < 3 * len(message)


def test_many_prompts_fit():
    prompts = tuple(f"{index}: {'word ' * 500}" for index in range(10_000))
    assert OrderRequest.decode(sent(orders.Tokenize(prompts=prompts))).order.prompts == prompts


@pytest.mark.parametrize(("num_messages", "num_limits"), [(0, 0), (1, 2), (2, 1), (3, 3)])
def test_one_or_two_messages_are_sent_each_with_a_time_limit(num_messages, num_limits):
    limits = "[" + ",".join(["1.0"] * num_limits) + "]"
    message = sent(orders.Send(messages=("",), timeouts_s=(1.0,)))
    zeros = "[" + ",".join(["0"] * num_messages) + "]"
    refused(message.replace('"messages":[0]', f'"messages":{zeros}').replace("[1.0]", limits))


# What is no order.


@pytest.mark.parametrize(
    "message",
    [
        "",
        "\n",
        "{}\n",
        "{",
        "[]\n",
        "null\n",
        "[" * 100_000 + "\n",
        '{"driver": {}, "token": "a token", "order": {"step": "hello"}}\n',
        "\ufeff{}\n",
        "x" * (1 << 20),
    ],
    ids=lambda message: message[:20],
)
def test_what_is_no_order_is_refused(message):
    assert len(refused(message)) < 1000


def test_an_order_of_too_many_keys_costs_little():
    """Of a caller that may give orders: of others nothing is read. The list of what is wrong with it took 380 MiB."""
    keys = ",".join(f'"{index:x}":1' for index in range(400_000))
    start_s = time.perf_counter()
    refused(f"{{{keys}}}\n")
    head = f"{{{keys}"[: orders.MAX_HEAD - 20].rpartition(",")[0] + "}\n"
    tracemalloc.start()
    assert "problems" in refused(head)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert time.perf_counter() - start_s < 3


def test_a_rank_says_little_of_a_message_with_many_faults():
    with pytest.raises(ValidationError) as caught:
        messages.Request.model_validate_json(json.dumps({str(index): 1 for index in range(100_000)}))
    assert first_problem(caught.value) == "100002 problems"
    with pytest.raises(ValidationError) as caught:
        messages.Request.model_validate_json(json.dumps({"id": 1, "order": {"step": "hello"}, "x" * 10_000: 1}))
    assert first_problem(caught.value) == "id: Input should be a valid string (1 of 2 problems)"


# Numbers.


@pytest.mark.parametrize("pid", [-1, 1 << 31, 1 << 62, 1 << 64, 10**30])
def test_a_number_that_no_process_has_is_refused(pid):
    message = sent(orders.Hello()).replace(f'"pid":{DRIVER.pid}', f'"pid":{pid}')
    assert "driver.pid" in refused(message)


@pytest.mark.parametrize("seconds", ["Infinity", "NaN", "-Infinity", "0", "-1", "1e10", "1e400", str(10**30)])
def test_nobody_waits_for_ever(seconds):
    send = sent(orders.Send(messages=("", ""), timeouts_s=(1.0, 7.0))).replace("7.0", seconds)
    assert "timeouts_s.1" in refused(send)
    pause = sent(orders.Pause(config=RefitConfig(timeout_s=7.0))).replace('"timeout_s":7.0', f'"timeout_s":{seconds}')
    assert "timeout_s" in refused(pause)


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e12, LONGEST_WAIT_S * 2, 0.0])
def test_no_rank_waits_for_ever(seconds):
    meeting = {"token": 32 * "a", "host": "h", "port": 1, "size": 2, "backend": "gloo"}
    with pytest.raises(ValidationError, match="timeout_s"):
        messages.Join(meeting=meeting, first_rank=1, timeout_s=seconds)


@pytest.mark.parametrize("version", [-1, 1 << 63, 10**100])
def test_a_version_that_is_none_is_refused(version):
    assert "version" in refused(sent(orders.Resume(version=7)).replace('"version":7', f'"version":{version}'))
