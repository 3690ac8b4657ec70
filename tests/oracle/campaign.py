"""Pushes to one server that answers without end, good ones and bad ones, and trainers that are killed in their middle."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.oracle.bands import NUM_POLICIES, Bands
from tests.oracle.judge import Answer, Attempt, Judge
from tests.oracle.load import Ask, Load
from tests.oracle.trainers import Order, Poison, Pushed, Setup, Step, Trainer, Trainers, Way

WAYS: tuple[Way, ...] = ("broadcast", "stream", "mapped")
_CHANCES: dict[Way, int] = {"broadcast": 2, "stream": 3, "mapped": 3}
_HEALING: dict[Way, int] = {"broadcast": 1, "stream": 4, "mapped": 2}
"""A broadcast takes longest where others came between: its ranks meet anew."""
_AIMED: dict[Way, int] = {"broadcast": 1, "stream": 2}
"""Where a write needs its trainer to the end. One that maps its memory is only waited for: a server that has the order goes
through with it."""
POISONS: tuple[Poison, ...] = ("nan", "shape", "name")
IN_FLIGHT = ("wait", "keep", "continue")
_PAUSE_S = 0.02
_SOONER = 0.9
"""How much, after a kill that was meant for a write came after it."""
_NUM_PROBES = 2
_SLOW_S = 5.0
"""A push that takes longer waited for something."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is done. Each mode of `in_flight` gets its share.

    Args:
        pushes: Good ones, beside those that heal, and two by every way at the beginning of each share.
        poisoned: Bad ones.
        kills: Trainers that are killed.
        kills_inside: Kills between the first byte and the commit, after which the campaign goes no further; 0 for all kills.
        seconds: When it ends, however far it came.
        clients: That ask at the same time.
        tokens: Of an answer.
        prompts: How long they are.
        ways: How policies come to the server.
        ahead: Trainers that are ready, or soon will be, to be killed.
        seed: Of everything that is drawn.
    """

    pushes: int
    poisoned: int
    kills: int
    kills_inside: int = 0
    seconds: float = 600.0
    clients: int = 3
    tokens: int = 16
    prompts: tuple[int, ...] = (24, 200)
    ways: tuple[Way, ...] = WAYS
    ahead: int = 2
    seed: int = 19


@dataclass(kw_only=True)
class _Kill:
    """How one trainer was killed."""

    way: Way
    aim: Step | None
    """After what; None for any moment."""
    was_whole: bool
    """Whether the server was, before."""
    outcome: str = ""
    decided_s: float = 0.0
    """Until the server said what it does now."""


@dataclass
class _Tally:
    attempts: list[Attempt] = field(default_factory=list)
    pushes: Counter[str] = field(default_factory=Counter)
    poisoned: Counter[str] = field(default_factory=Counter)
    kills: list[_Kill] = field(default_factory=list)
    prints: dict[int, set[tuple[str, ...]]] = field(default_factory=dict)
    repeated: int = 0
    healed: int = 0

    @property
    def is_dirty(self) -> bool:
        decided = [attempt.outcome for attempt in self.attempts if attempt.outcome != "kept"]
        return bool(decided) and decided[-1] == "dirty"

    @property
    def num_inside(self) -> int:
        return sum(kill.was_whole and kill.outcome == "dirty" for kill in self.kills)


class Campaign:
    """One server under pushes.

    Args:
        setup: The server, and what trainers push to it.
        ask: Asks it.
        plan: How much is done.
        log: Told how far it came.
    """

    def __init__(self, setup: Setup, ask: Ask, plan: Plan, log: Callable[[str], None] = print) -> None:
        self._setup, self._plan, self._log = setup, plan, log
        self._bands = Bands(setup.shape)
        vocab_size = self._bands.vocab_size
        prompts = [[(31 * i + 7 * j) % vocab_size for j in range(n)] for i, n in enumerate(plan.prompts)]
        self._load = Load(ask, prompts, num_clients=plan.clients, num_tokens=plan.tokens)
        self._chance = random.Random(plan.seed)
        self._tally = _Tally()
        self._num_orders = 0
        self._write_s: dict[str, float] = {}
        self._push_s: dict[str, float] = {}
        self._ended_by: str | None = None

    def run(self) -> Iterator[dict]:
        """What was found, again and again as more is done; the last is all of it."""
        start_s = time.monotonic()
        self._deadline_s = start_s + self._plan.seconds
        self._steady, self._victims = Trainer(self._setup), Trainers(self._setup, self._plan.ahead)
        try:
            self._push_well(self._plan.ways[0], "wait")
            self._log("first policy pushed")
            with self._load:
                for way in self._plan.ways:
                    self._measure(way)
                for part, in_flight in enumerate(IN_FLIGHT, start=1):
                    yield from self._run_part(in_flight, part)
                if self._tally.is_dirty:
                    self._push_well(self._plan.ways[0], "wait")
                self._probe()
        except AssertionError as error:
            self._ended_by = str(error)
            self._log(self._ended_by)
        finally:
            self._victims.close()
            self._steady.kill()
        yield self.found() | {"seconds": time.monotonic() - start_s}

    def found(self) -> dict:
        """What was found until now."""
        tally, decided = self._tally, self._tally.kills
        if not tally.attempts:
            return {"ended_by": self._ended_by}
        judged = Judge(self._bands, tally.attempts).judge(list(self._load.answers))
        return {
            "ended_by": self._ended_by,
            "pushes": sum(tally.pushes.values()),
            "pushes_by": dict(tally.pushes),
            "pushes_that_healed": tally.healed,
            "pushes_repeated": tally.repeated,
            "poisoned": sum(tally.poisoned.values()),
            "poisoned_by": dict(tally.poisoned),
            "kills": len(decided),
            "kills_inside_the_write": tally.num_inside,
            "kills_by": {way: dict(Counter(k.outcome for k in decided if k.way == way)) for way in WAYS},
            "kills_inside_by": {
                way: sum(k.was_whole and k.outcome == "dirty" for k in decided if k.way == way) for way in WAYS
            },
            "kills_by_aim": dict(Counter(kill.aim or "any moment" for kill in decided)),
            "longest_decision_s": max((kill.decided_s for kill in decided), default=0.0),
            "longest_push_s": max(attempt.end_s - attempt.begin_s for attempt in tally.attempts),
            "write_s": self._write_s,
            "policies_with_several_fingerprints": sum(len(found) > 1 for found in tally.prints.values()),
            "judged": judged,
        }

    def _run_part(self, in_flight: str, part: int) -> Iterator[dict]:
        """One mode: every way twice, as the second push finds what the first one left. Then everything in an order that is
        drawn, and a dirty server is healed, or attacked once more.
        """
        plan, start_s = self._plan, time.monotonic()
        share = lambda count: count * part // len(IN_FLIGHT) - count * (part - 1) // len(IN_FLIGHT)  # noqa: E731
        deadline_s = start_s + (self._deadline_s - start_s) / (len(IN_FLIGHT) + 1 - part)
        steps = ["push"] * share(plan.pushes) + ["poison"] * share(plan.poisoned) + ["kill"] * share(plan.kills)
        self._chance.shuffle(steps)
        goal = plan.kills_inside * part // len(IN_FLIGHT)
        for way in plan.ways:
            self._push_well(way, in_flight)
            self._push_well(way, in_flight)
        for number, step in enumerate(steps):
            if time.monotonic() > deadline_s:
                self._log(f"{in_flight}: out of time after {number} of {len(steps)} steps")
                break
            if self._tally.is_dirty and self._chance.random() > 0.1:
                self._push_well(self._draw(_HEALING), in_flight)
            if step == "push":
                self._push_well(self._draw(_CHANCES), in_flight)
            elif step == "poison":
                self._push_poison(in_flight)
            elif not goal or self._tally.num_inside < goal:
                self._push_to_be_killed(in_flight)
            time.sleep(_PAUSE_S)
            if number % 20 == 19:
                self._log(f"{in_flight}: {number + 1} of {len(steps)} steps, {self._tally.num_inside} killed inside")
                yield self.found()

    def _measure(self, way: Way) -> None:
        """How long a push and its write take of a trainer that never pushed, as those that are killed are."""
        pushed = self._push_well(way, "wait", by=self._victims.take())
        self._write_s[way], self._push_s[way] = pushed.write_s, pushed.end_s - pushed.begin_s

    def _draw(self, chances: dict[Way, int]) -> Way:
        ways = [way for way in chances if way in self._plan.ways]
        return self._chance.choices(ways, [chances[way] for way in ways])[0]

    def _order(self, way: Way, in_flight: str, **options: Any) -> Order:
        self._num_orders += 1
        number = self._num_orders
        return Order(policy=number % NUM_POLICIES, way=way, in_flight=in_flight, seed=number, **options)

    def _push_well(self, way: Way, in_flight: str, *, by: Trainer | None = None) -> Pushed:
        """A good push, after which the server answers with the new policy at once."""
        trainer, order, was_dirty = (
            by if by is not None else self._steady,
            self._order(way, in_flight),
            self._tally.is_dirty,
        )
        begin_s = trainer.begin(order)
        pushed = trainer.end()
        assert pushed is not None, f"the trainer of a good push died ({order})"
        if pushed.error == "RankFailedError" and "refit again" in pushed.message and by is None:
            # Another trainer came between, and this one is told what to do.
            self._tally.repeated += 1
            trainer.begin(order)
            pushed = trainer.end()
            assert pushed is not None, f"the trainer of a good push died ({order})"
        assert pushed.error is None, f"a good push failed ({order}): {pushed.error}: {pushed.message}"
        self._note(order, begin_s, pushed.end_s, "served", pushed.version)
        self._tally.prints.setdefault(order.policy, set()).add(pushed.fingerprints)
        self._tally.pushes[f"{way}, {in_flight}"] += 1
        self._tally.healed += was_dirty
        self._probe()
        if by is not None:
            by.kill()
        return pushed

    def _push_poison(self, in_flight: str) -> None:
        """A bad push, of one kind after the other, which is refused before it writes, or leaves the server dirty."""
        poison = POISONS[self._tally.poisoned.total() % len(POISONS)]
        way = self._draw(_CHANCES)
        order, was_dirty = self._order(way, in_flight, poison=poison), self._tally.is_dirty
        begin_s = self._steady.begin(order)
        pushed = self._steady.end()
        assert pushed is not None and pushed.error is not None, f"a bad push went through ({order})"
        self._note(order, begin_s, pushed.end_s, "dirty" if pushed.is_dirty or was_dirty else "kept")
        self._tally.poisoned[poison] += 1
        self._probe()

    def _push_to_be_killed(self, in_flight: str) -> None:
        """A push whose trainer is killed: as it writes, most of the time; as requests are waited for; or at any moment."""
        aims = Counter(kill.aim for kill in self._tally.kills)
        chances = {"write": 0.8, "pause": 0.1, None: 0.1}
        aim: Step | None = self._chance.choices(list(chances), list(chances.values()))[0]
        if not aims["pause"]:  # at least once
            aim = "pause"
        way = self._draw(_AIMED if aim == "write" else _CHANCES)
        draw = self._chance.random()
        dies_s = {"write": draw * self._write_s[way], "pause": draw * _PAUSE_S, None: 0.0}[aim]
        order = self._order(way, in_flight, dies_after=aim, dies_s=dies_s)
        kill = _Kill(way=way, aim=aim, was_whole=not self._tally.is_dirty)
        victim = self._victims.take()
        begin_s = victim.begin(order)
        pushed = victim.end(None if aim else 1.1 * draw * self._push_s[way])
        if pushed is None and not aim:
            victim.kill()
        killed_s = time.monotonic()
        if pushed is not None:  # it was faster
            victim.kill()
            self._write_s[way] *= _SOONER if aim == "write" else 1
            assert pushed.error is None, f"a good push failed ({order}): {pushed.error}: {pushed.message}"
            self._note(order, begin_s, pushed.end_s, "served", pushed.version)
            self._tally.pushes[f"{way}, {in_flight}"] += 1
            self._tally.healed += not kill.was_whole
            return
        assert victim.was_killed, f"a trainer ended otherwise than by SIGKILL ({order})"
        answer = self._load.ask(self._num_orders)
        outcome = self._outcome_of(answer, order)
        kill.outcome, kill.decided_s = outcome, answer.heard_s - killed_s
        if aim == "write" and outcome == "served":
            self._write_s[way] *= _SOONER
        self._tally.kills.append(kill)
        self._note(order, begin_s, answer.heard_s, outcome)

    def _outcome_of(self, answer: Answer, order: Order) -> Any:
        """What the server does after a trainer was killed, by what it says to one request."""
        if answer.status == 503:
            return "dirty"
        assert answer.status == 200, f"after a kill ({order}) a request got {answer.status}"
        said = self._bands.read(answer.tokens[-1]).policy
        return "served" if said == order.policy else "kept"

    def _note(self, order: Order, begin_s: float, end_s: float, outcome: Any, version: int | None = None) -> None:
        attempt = Attempt(
            policy=order.policy,
            in_flight=order.in_flight,
            begin_s=begin_s,
            end_s=end_s,
            outcome=outcome,
            version=version,
        )
        self._tally.attempts.append(attempt)
        if end_s - begin_s > _SLOW_S:
            self._log(f"{order}, {outcome}: took {end_s - begin_s:.1f} s, the {len(self._tally.attempts)}. attempt")

    def _probe(self) -> None:
        """Equal prompts, long ones, which the caches of the policy before would answer."""
        for place in range(_NUM_PROBES):
            self._load.ask(place)
