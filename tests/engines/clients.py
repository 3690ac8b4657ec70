"""What is done to an engine through a trainer's own client, whatever the engine, and what must come of it.

`try_client` does it, in the process of the trainer. A test file imports the tests, and has a fixture `tried`: what that
found, and under `fresh` what the ranks of engines hold that boot from the same policies.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Pairs = list[tuple[str, Tensor]]
NUM_IN_A_ROW = 20
SEEDS = (1, 2, 3)
"""Of the policies, whose checkpoints fresh engines boot."""
FAMILY = "qwen2_wide"
LONGEST_S = 60


class Client(Protocol):
    """A trainer with its engine."""

    tells: bool
    """Whether what fails in the engine is raised in the trainer, and not only written to the engine's log."""

    outlives: bool
    """Whether the engine outlives a trainer that is gone: not if its own receiver waits for it without a limit of time."""

    def push(self, pairs: Pairs) -> None:
        """Send what the trainer takes for a whole policy, to its end. Raises what the trainer sees."""

    def leave(self, pairs: Pairs) -> None:
        """Send these, be gone without an end, and be another trainer from now on."""

    def look(self) -> dict[str, list]:
        """For each rank, what it holds (`live`), where (`places`), and its version (`versions`)."""

    def generate(self) -> Any:
        """An answer of the engine's."""

    def echo(self, said: str) -> list[str]:
        """What each rank answers to a call of the trainer's own: the same."""


def try_client(client: Client, policies: Sequence[Mapping[str, Tensor]]) -> dict:
    """Three policies, each fault and the policy that heals it, and many policies in a row."""
    first, second, third = (list(policy.items()) for policy in policies)
    found: dict = {"tells": client.tells, "policies": [], "faults": {}}
    for pairs in (first, second, third):
        client.push(pairs)
        found["policies"].append(client.look() | {"said": client.generate()})
    half = len(second) // 2
    faults: dict[str, Callable[[], None]] = {
        "nan": lambda: client.push(with_nan(second)),
        "half": lambda: client.push(second[:half]),
        "killed": lambda: client.leave(second[:half]),
    }
    for name, fault in faults.items() if client.outlives else list(faults.items())[:-1]:
        one = {"raised": attempt(fault), "refused": attempt(client.generate), "echo": client.echo(name)}
        client.push(first)
        found["faults"][name] = one | {
            "healed": client.look(),
            "said": client.generate(),
            "again": client.echo("again"),
        }
    found["second"] = {}
    for name, pairs in {"in order": first, "in another order": first[::-1]}.items():
        attempt(lambda: client.push(second[:half]))
        one = {"raised": attempt(lambda pairs=pairs: client.push(pairs)), "refused": attempt(client.generate)}
        one |= {"found": client.look(), "echo": client.echo(name)}
        client.push(third)
        found["second"][name] = one | {"healed": client.look(), "said": client.generate()}
    for index in range(NUM_IN_A_ROW):
        client.push((first, second, third)[index % 3])
    return found | {"row": client.look()}


def with_nan(pairs: Pairs) -> Pairs:
    name, tensor = pairs[len(pairs) // 2]
    broken = tensor.clone()
    broken.view(-1)[3] = torch.nan
    return [(name, broken) if pair[0] == name else pair for pair in pairs]


def attempt(call: Callable[[], Any]) -> dict:
    """What comes of it, and how soon."""
    start_s, error = time.monotonic(), ""
    try:
        call()
    except Exception as raised:  # noqa: BLE001 - trainers raise what they like
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "seconds": time.monotonic() - start_s}


def test_every_rank_holds_what_that_of_a_fresh_engine_boots(tried):
    fresh = tried["fresh"]
    assert fresh[0] != fresh[1] != fresh[2]
    assert [policy["live"] for policy in tried["policies"]] == fresh


def test_no_live_tensor_moves(tried):
    assert tried["row"]["places"] == tried["policies"][0]["places"]


def test_a_fault_is_raised_where_the_trainer_sees_it_and_keeps_nobody_waiting(tried):
    for name, fault in tried["faults"].items():
        assert fault["raised"]["seconds"] < LONGEST_S
        if name == "nan":
            assert bool(fault["raised"]["error"]) is tried["tells"], fault["raised"]
        assert "refuses requests" in fault["refused"]["error"], fault["refused"]
        assert fault["refused"]["seconds"] < LONGEST_S


def test_the_next_policy_heals_it(tried):
    for fault in tried["faults"].values():
        assert fault["healed"]["live"] == tried["fresh"][0]
    for second in tried["second"].values():
        assert second["healed"]["live"] == tried["fresh"][2]


def test_a_second_policy_before_the_first_is_whole_is_never_mixed_with_it(tried):
    in_order, other = tried["second"]["in order"], tried["second"]["in another order"]
    assert in_order["raised"]["error"] == ""
    assert in_order["found"]["live"] == tried["fresh"][0]
    if other["refused"]["error"]:
        assert "refuses requests" in other["refused"]["error"]
    else:
        assert other["found"]["live"] == tried["fresh"][0]


def test_no_reply_is_that_of_an_older_call(tried):
    for name, fault in tried["faults"].items():
        assert set(fault["echo"]) == {name}
        assert set(fault["again"]) == {"again"}
    for name, second in tried["second"].items():
        assert set(second["echo"]) == {name}


def test_after_many_policies_in_a_row_the_last_one_is_there(tried):
    before = sum(1 for _ in SEEDS)
    assert set(tried["row"]["versions"]) > {before} or min(tried["row"]["versions"]) > before + NUM_IN_A_ROW
    assert tried["row"]["live"] == tried["fresh"][(NUM_IN_A_ROW - 1) % 3]
