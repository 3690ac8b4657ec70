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
        path=ORDERS,
        before="""    if not token:
        return None
    if len(token) < MIN_TOKEN or not is_header(token):
""",
        after="""    if token is None:
        return None
    if token and (len(token) < MIN_TOKEN or not is_header(token)):
""",
        found_by=STRANGERS,
    ),
    Fault(
        name="body before trust",
        path=DOOR,
        before="""            self._check_may_ask(scope)
            if self._num_visitors""",
        after="""            body = await _read(receive)

            async def receive() -> Mapping[str, Any]:
                return {"type": "http.request", "body": body.encode()}

            self._check_may_ask(scope)
            if self._num_visitors""",
        found_by=STRANGERS,
    ),
    Fault(
        name="order without bound",
        path=DOOR,
        before="""                if len(body) > orders.MAX_ORDER_BYTES:
                    raise _too_long()
""",
        after="",
        found_by=STATES,
    ),
    Fault(
        name="announced length not looked at",
        path=DOOR,
        before="(length.isdecimal() and int(length) > orders.MAX_ORDER_BYTES)",
        after="(length.isdecimal() and int(length) < 0)",
        found_by=STRANGERS,
    ),
    Fault(
        name="body drips for ever",
        path=DOOR,
        before="async with asyncio.timeout(READING_S):",
        after="async with asyncio.timeout(None):",
        found_by=STATES,
    ),
    Fault(
        name="visitor counted for ever",
        path=DOOR,
        before="""            finally:
                self._num_visitors -= 1
""",
        after="""            finally:
                pass
""",
        found_by=STATES,
    ),
    Fault(
        name="parsed under the lock",
        path="fp8refit/remote/servers/order_handler.py",
        before="""            request = OrderRequest.decode(message)
            async with self._turn:
                await""",
        after="""            async with self._turn:
                request = OrderRequest.decode(message)
                await""",
        found_by=STATES,
    ),
    Fault(
        name="list of everything that is wrong with an order",
        path="fp8refit/remote/messages.py",
        before="""    if count > _MAX_PROBLEMS:
        return f"{count} problems"
""",
        after="",
        found_by="tests/fuzz/test_servers.py -k costs_little",
    ),
    Fault(
        name="head without bound",
        path=ORDERS,
        before="""        end = message.find("\\n", 0, MAX_HEAD + 1)
""",
        after="""        end = message.find("\\n")
""",
        found_by="tests/fuzz/test_servers.py -k costs_little",
    ),
    Fault(
        name="rank tells everything that is wrong with a message",
        path="fp8refit/remote/rank_server.py",
        before="({messages.first_problem(error)})",
        after="({error})",
        found_by="tests/fuzz/test_servers.py -k told_briefly",
    ),
    Fault(
        name="limit of each read alone",
        path=CLIENT,
        before="            return self._outcome.result(timeout_s)\n",
        after="            return self._outcome.result(None)\n",
        found_by="tests/fuzz/test_servers.py -k ends_in_time",
    ),
    Fault(
        name="connection stays open after its answer",
        path=CLIENT,
        before="""        finally:
            connection.close()
""",
        after="""        finally:
            pass
""",
        found_by=f"{CONNECTIONS} -k which_is_closed",
    ),
    Fault(
        name="connection of a refused order stays open",
        path=DOOR,
        before='CLOSED: Mapping[str, str] = {"Connection": "close"}\n',
        after="CLOSED: Mapping[str, str] = {}\n",
        found_by="tests/remote/servers/test_http_endpoint.py -k refused_order_is_closed",
    ),
    Fault(
        name="any loopback address is this host",
        path=DOOR,
        before="    if not client or client[0] not in _LOOPBACK:\n",
        after='    if not client or not (client[0] in _LOOPBACK or client[0].startswith("127.")):\n',
        found_by=STRANGERS,
    ),
    Fault(
        name="unknown address is this host",
        path=DOOR,
        before="    if not client or client[0] not in _LOOPBACK:\n",
        after="    if client and client[0] not in _LOOPBACK:\n",
        found_by=STRANGERS,
    ),
    Fault(
        name="proxies pass orders on",
        path=DOOR,
        before="        if _OF_A_PROXY.fullmatch(name):\n",
        after="        if not name:\n",
        found_by=STRANGERS,
    ),
    Fault(
        name="pages give orders",
        path=DOOR,
        before="        if _OF_A_BROWSER.fullmatch(name):\n",
        after="        if not name:\n",
        found_by=STRANGERS,
    ),
    Fault(
        name="any name of the host",
        path=DOOR,
        before="    if not _LOCAL_NAME.fullmatch(host):\n",
        after="    if not host:\n",
        found_by=STRANGERS,
    ),
    Fault(
        name="text is an order",
        path=DOOR,
        before='        if headers.get("content-type") != orders.MEDIA_TYPE:\n',
        after='        if not headers.get("content-type"):\n',
        found_by=STRANGERS,
    ),
    Fault(
        name="api key is not looked at",
        path=DOOR,
        before='            if kind.lower() == "bearer" and any(',
        after='            if kind.lower() != "basic" or any(',
        found_by=STRANGERS,
    ),
    Fault(
        name="seconds without bound",
        path="fp8refit/config.py",
        before="    timeout_s: float = Field(default=300.0, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)\n",
        after="    timeout_s: float = Field(default=300.0, gt=0)\n",
        found_by=STATES,
    ),
    Fault(
        name="seconds of an order without bound",
        path="fp8refit/config.py",
        before="Wait: TypeAlias = Annotated[float, Field(gt=0, le=LONGEST_WAIT_S, allow_inf_nan=False)]\n",
        after="Wait: TypeAlias = Annotated[float, Field(gt=0)]\n",
        found_by=STATES,
    ),
    Fault(
        name="any number is a process",
        path=ORDERS,
        before="    pid: int = Field(ge=0, lt=1 << 31)\n",
        after="    pid: int\n",
        found_by=STATES,
    ),
    Fault(
        name="url is not looked at",
        path=CLIENT,
        before="        except ValueError as error:\n            why = str(error)\n",
        after="        except ZeroDivisionError as error:\n            why = str(error)\n",
        found_by="tests/fuzz/test_servers.py -k no_url",
    ),
    Fault(
        name="engine waits for a driver that died",
        path="fp8refit/remote/servers/order_handler.py",
        before="""            if version != self._version:
                await self._publish(version)
            await self._controls.resume()
""",
        after="""            if version != self._version:
                await self._publish(version)
""",
        found_by=STATES,
    ),
    Fault(
        name="engine waits for a driver that fell silent",
        path="fp8refit/remote/servers/order_handler.py",
        before="            if self._holder is not None:\n                reason",
        after="            if self._holder is not None and self._silence is None:\n                reason",
        found_by=STATES,
    ),
    Fault(
        name="mixture is served after a driver died",
        path="fp8refit/remote/servers/order_handler.py",
        before="        is_whole = len(versions) == 1 and not any(reply.is_dirty or reply.error for reply in replies)\n",
        after="        is_whole = not any(reply.error for reply in replies)\n",
        found_by=STATES,
    ),
    Fault(
        name="a policy that cannot be described leaves the answers of ranks that read ahead to the next order",
        path="fp8refit/remote/host_route.py",
        before="                await reading\n",
        after="                pass\n",
        found_by="tests/remote/test_ranks.py -k leaves_no_answer",
    ),
    Fault(
        name="an interrupted order comes out of the next one",
        path="fp8refit/remote/servers/order_handler.py",
        before="        except (KeyboardInterrupt, SystemExit) as error:\n            return error\n",
        after="",
        found_by="tests/driver/test_hosted_engine.py -k interrupt",
    ),
]
