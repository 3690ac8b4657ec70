"""SECURITY.md says of bounds and headers what the code has."""

from pathlib import Path

import pytest

from fp8refit import RefitConfig
from fp8refit.remote.servers import http_endpoint as door
from fp8refit.remote.servers import order_handler, orders

ROOT = Path(__file__).parents[1]
SAID, ON_SERVERS = (" ".join((ROOT / page).read_text().split()) for page in ("SECURITY.md", "docs/servers.md"))


@pytest.mark.parametrize(
    "fact",
    [
        f"A token has {orders.MIN_TOKEN} characters or more",
        f"in the header `{orders.TOKEN_HEADER}`",
        f"`{orders.TOKEN_VARIABLE}` in its environment",
        f"| the size of an order | {orders.MAX_ORDER_BYTES >> 20} MiB, of which {orders.MAX_HEAD >> 10} Ki characters",
        f"| the time for an order to arrive | {door.READING_S:g} s |",
        f"orders that arrive, wait or run at a time | {door.MAX_VISITORS} |",
        f"| an answer to the driver | {orders.MAX_BYTES >> 20} MiB",
        f"may hold a server | `timeout_s` plus {order_handler.SILENCE_S:g} s |",
    ],
)
def test_a_bound_stands_there_as_it_is(fact):
    assert fact in SAID


def test_a_day_is_the_bound_of_a_step():
    assert "| `timeout_s` | one day |" in SAID
    assert RefitConfig.model_fields["timeout_s"].metadata[1].le == 24 * 60 * 60


def test_the_page_on_servers_says_the_same_of_tokens():
    assert f"`{orders.TOKEN_VARIABLE}` in its environment ({orders.MIN_TOKEN} characters or more)" in ON_SERVERS
    assert f"in the header `{orders.TOKEN_HEADER}`" in ON_SERVERS
