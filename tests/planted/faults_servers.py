"""Faults of servers, and of those who ask them: who may, how much is read, and how long is waited."""

from tests.planted.fault import Fault

STATES = "tests/fuzz/test_servers.py -k TestServers"
STRANGERS = "tests/fuzz/test_servers.py -k strangers"
CLIENT = "fp8refit/remote/servers/http_client.py"
CONNECTIONS = "tests/remote/servers/test_http_client.py"
DOOR = "fp8refit/remote/servers/http_endpoint.py"
ORDERS = "fp8refit/remote/servers/orders.py"

FAULTS = [
    Fault(
        name="empty token is a token",
        at=f"{ORDERS}::read_token",
        before="if not token:\n    return None\nif len(token) < MIN_TOKEN or not is_header(token):\n    ...",
        after="""
            if token is None:
                return None
            if token and (len(token) < MIN_TOKEN or not is_header(token)):
                ...
        """,
        found_by=STRANGERS,
    ),
    Fault(
        name="body before trust",
        at=f"{DOOR}::Door.take",
        before="self._check_may_ask(scope)",
        after="""
            body = await _read(receive)
            async def receive() -> Mapping[str, Any]:
                return {"type": "http.request", "body": body.encode()}
            self._check_may_ask(scope)
        """,
        found_by=STRANGERS,
    ),
    Fault(
        name="order without bound",
        at=f"{DOOR}::_read",
        before="if len(body) > orders.MAX_ORDER_BYTES:\n    raise _too_long()",
        found_by=STATES,
    ),
    Fault(
        name="announced length not looked at",
        at=f"{DOOR}::Door._check_may_ask",
        before="int(length) > orders.MAX_ORDER_BYTES",
        after="int(length) < 0",
        found_by=STRANGERS,
    ),
    Fault(
        name="body drips for ever",
        at=f"{DOOR}::_read",
        before="asyncio.timeout(READING_S)",
        after="asyncio.timeout(None)",
        found_by=STATES,
    ),
    Fault(
        name="visitor counted for ever",
        at=f"{DOOR}::Door.take",
        before="self._num_visitors -= 1",
        found_by=STATES,
    ),
    Fault(
        name="parsed under the lock",
        at="fp8refit/remote/servers/order_handler.py::OrderHandler._carry_out",
        before="request = OrderRequest.decode(message)\nasync with self._turn:\n    ...",
        after="async with self._turn:\n    request = OrderRequest.decode(message)\n    ...",
        found_by=STATES,
    ),
    Fault(
        name="list of everything that is wrong with an order",
        at="fp8refit/remote/protocol/messages.py::first_problem",
        before='if count > _MAX_PROBLEMS:\n    return f"{count} problems"',
        found_by="tests/fuzz/test_servers.py -k costs_little",
    ),
    Fault(
        name="head without bound",
        at=f"{ORDERS}::OrderRequest.decode",
        before='message.find("\\n", 0, MAX_HEAD + 1)',
        after='message.find("\\n")',
        found_by="tests/fuzz/test_servers.py -k costs_little",
    ),
    Fault(
        name="rank tells everything that is wrong with a message",
        at="fp8refit/remote/rank_server.py::_read",
        before=(
            "f\"this rank (fp8refit {__version__}) cannot read the driver's message; install the same "
            'version on both sides " f"({messages.first_problem(error)})"'
        ),
        after=(
            "f\"this rank (fp8refit {__version__}) cannot read the driver's message; install the same "
            'version on both sides " f"({error})"'
        ),
        found_by="tests/fuzz/test_servers.py -k told_briefly",
    ),
    Fault(
        name="limit of each read alone",
        at=f"{CLIENT}::_Exchange.run",
        before="self._outcome.result(timeout_s)",
        after="self._outcome.result(None)",
        found_by="tests/fuzz/test_servers.py -k ends_in_time",
    ),
    Fault(
        name="connection stays open after its answer",
        at=f"{CLIENT}::_Exchange._post",
        before="connection.close()",
        found_by=f"{CONNECTIONS} -k which_is_closed",
    ),
    Fault(
        name="connection of a refused order stays open",
        at=DOOR,
        before='{"Connection": "close"}',
        after="{}",
        found_by="tests/remote/servers/test_http_endpoint.py -k refused_order_is_closed",
    ),
    Fault(
        name="any loopback address is this host",
        at=f"{DOOR}::_why_elsewhere",
        before="client[0] not in _LOOPBACK",
        after='not (client[0] in _LOOPBACK or client[0].startswith("127."))',
        found_by=STRANGERS,
    ),
    Fault(
        name="unknown address is this host",
        at=f"{DOOR}::_why_elsewhere",
        before="not client or client[0] not in _LOOPBACK",
        after="client and client[0] not in _LOOPBACK",
        found_by=STRANGERS,
    ),
    Fault(
        name="proxies pass orders on",
        at=f"{DOOR}::_why_elsewhere",
        before="_OF_A_PROXY.fullmatch(name)",
        after="not name",
        found_by=STRANGERS,
    ),
    Fault(
        name="pages give orders",
        at=f"{DOOR}::_why_elsewhere",
        before="_OF_A_BROWSER.fullmatch(name)",
        after="not name",
        found_by=STRANGERS,
    ),
    Fault(
        name="any name of the host",
        at=f"{DOOR}::_why_elsewhere",
        before="_LOCAL_NAME.fullmatch(host)",
        after="host",
        found_by=STRANGERS,
    ),
    Fault(
        name="text is an order",
        at=f"{DOOR}::Door._check_may_ask",
        before='headers.get("content-type") != orders.MEDIA_TYPE',
        after='not headers.get("content-type")',
        found_by=STRANGERS,
    ),
    Fault(
        name="api key is not looked at",
        at=f"{DOOR}::Door._distrust",
        before='kind.lower() == "bearer" and any(_is_same(shown, key) for key in self._api_keys)',
        after='kind.lower() != "basic" or any(_is_same(shown, key) for key in self._api_keys)',
        found_by=STRANGERS,
    ),
    Fault(
        name="seconds without bound",
        at="fp8refit/config.py::RefitConfig",
        before="Field(default=300.0, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)",
        after="Field(default=300.0, gt=0)",
        found_by=STATES,
    ),
    Fault(
        name="seconds of an order without bound",
        at="fp8refit/config.py",
        before="Field(gt=0, le=LONGEST_WAIT_S, allow_inf_nan=False)",
        after="Field(gt=0)",
        found_by=STATES,
    ),
    Fault(
        name="any number is a process",
        at=f"{ORDERS}::Caller",
        before="pid: int = Field(ge=0, lt=1 << 31)",
        after="pid: int",
        found_by=STATES,
    ),
    Fault(
        name="url is not looked at",
        at=f"{CLIENT}::_split",
        before="try:\n    ...\nexcept ValueError as error:\n    ...",
        after="try:\n    ...\nexcept ZeroDivisionError as error:\n    ...",
        found_by="tests/fuzz/test_servers.py -k no_url",
    ),
    Fault(
        name="a pause that comes after its end pauses",
        at="fp8refit/remote/servers/order_handler.py::OrderHandler._check_is_next",
        before="0 < order.number == last",
        after="0 > order.number",
        found_by="tests/remote/servers/test_server_driver.py -k after_its_end",
    ),
    Fault(
        name="what ends a pause ends a later one of the same driver",
        at="fp8refit/remote/servers/order_handler.py::OrderHandler._check_is_next",
        before="order.number < last",
        after="order.number < 0",
        found_by="tests/remote/servers/test_server_driver.py -k earlier_pause",
    ),
    Fault(
        name="engine waits for a driver that died",
        at="fp8refit/remote/servers/order_handler.py::OrderHandler._settle",
        before="await self._controls.resume()",
        found_by=STATES,
    ),
    Fault(
        name="engine waits for a driver that fell silent",
        at="fp8refit/remote/servers/order_handler.py::OrderHandler._obey_watched",
        before="self._holder is not None",
        after="self._holder is not None and self._silence is None",
        found_by=STATES,
    ),
    Fault(
        name="mixture is served after a driver died",
        at="fp8refit/remote/protocol/messages.py::common_version",
        before="len(versions) == 1 and not any(outcome.is_dirty or outcome.error for outcome in outcomes)",
        after="not any(outcome.error for outcome in outcomes)",
        found_by=STATES,
    ),
    Fault(
        name="a server resumes by what ranks say before they have written",
        at="fp8refit/remote/protocol/messages.py::common_version",
        before="all(outcome.id == asked and outcome.reports for outcome in outcomes)",
        after="all(outcome.id == asked for outcome in outcomes)",
        found_by="tests/remote/servers/test_server_driver.py -k before_they_have_written",
    ),
    Fault(
        name="an engine joins with another policy than the others serve",
        at="fp8refit/driver/broadcaster.py::_agrees",
        before="fingerprints != own",
        after="not fingerprints",
        found_by="tests/driver/test_broadcaster.py -k joins_with_another_policy",
    ),
    Fault(
        name="a server that has left the router is pushed to still",
        at="fp8refit/driver/broadcaster.py::Broadcaster._follow",
        before="gone or new",
        after="new",
        found_by="tests/driver/test_broadcaster.py -k engines_that_are_passed_stay",
    ),
    Fault(
        name="a policy that cannot be described leaves the answers of ranks that read ahead to the next order",
        at="fp8refit/remote/host/host_route.py::HostRoute._prepare",
        before="await reading",
        found_by="tests/remote/test_ranks.py -k leaves_no_answer",
    ),
    Fault(
        name="an interrupted order comes out of the next one",
        at="fp8refit/remote/servers/order_handler.py::OrderHandler._answer",
        before="(KeyboardInterrupt, SystemExit)",
        after="()",
        found_by="tests/driver/test_hosted_engine.py -k interrupt",
    ),
]
