"""Holds every answer of a server against what was pushed to it, and when."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise, starmap, takewhile
from typing import Literal

from tests.oracle.bands import Bands

Outcome = Literal["served", "kept", "dirty"]
"""Of an attempt: its policy is served; what was served before still is, whole; or the server refuses requests."""
FREEZES = ("keep", "continue")
"""Modes that leave a request an answer of two policies. After `continue`, KV of the older ones is behind its tokens too."""
VIOLATIONS = ("stale", "mixed", "while_dirty", "foreign", "misnamed", "failed")
_NUM_EXAMPLES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One push, good or not, and what the server did afterwards. Seconds are those of one clock."""

    policy: int
    in_flight: str
    begin_s: float
    end_s: float
    outcome: Outcome
    version: int | None = None
    """Of the policy, if it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a client heard."""

    sent_s: float
    heard_s: float
    status: int
    tokens: Sequence[int] = ()
    num_asked: int = 0
    version: str | None = None
    """Of the policy, as the server says with its answer."""


class Judge:
    """What one server may say, after what was tried on it.

    Args:
        bands: Of the model.
        attempts: In their order; the first is served.
    """

    def __init__(self, bands: Bands, attempts: Sequence[Attempt]) -> None:
        assert attempts[0].outcome == "served", "the first policy is whole"
        self._bands = bands
        self._attempts = tuple(attempts)
        self._versions = {attempt.version: attempt.policy for attempt in attempts if attempt.outcome == "served"}

    def judge(self, answers: Iterable[Answer]) -> dict:
        """How many answers are of which kind, and examples of what may not be."""
        counts: Counter[str] = Counter()
        examples: list[dict] = []
        for answer in answers:
            kind, why = self.verdict(answer)
            counts["answers"] += 1
            counts[kind] += 1
            if kind in VIOLATIONS and len(examples) < _NUM_EXAMPLES:
                examples.append({"kind": kind, "why": why, "at_s": answer.sent_s - self._attempts[0].begin_s})
        return {**counts, "examples": examples}

    def verdict(self, answer: Answer) -> tuple[str, str]:
        """What kind an answer is, and why."""
        if answer.status != 200:
            return self._verdict_on_refusal(answer)
        if self._dirty_throughout(answer):
            return "while_dirty", f"{list(answer.tokens)[:8]}"
        said = [self._bands.read(token) for token in answer.tokens]
        goes_on = partial(self._goes_on, self._served(answer))
        met = [(each.other, each.policy) for each in said if each.other is not None]
        if not all(starmap(goes_on, met)):
            return "mixed", f"{[(each.policy, each.other) for each in said]}"
        policies = [policy for policy, _ in groupby(each.policy for each in said)]
        if wrong := self._wrong_order(answer, policies):
            return wrong
        named = self._versions.get(int(answer.version)) if (answer.version or "").isdecimal() else None
        # SGLang hands out a token only after it has prepared the next one: after a refit, if requests go on.
        if policies and named is not None and named != policies[-1] and not goes_on(policies[-1], named):
            return "misnamed", f"version {answer.version} is policy {named}, tokens are of {policies}"
        if met:
            return "of_two_across_continue", ""
        if len(policies) > 1:
            return "of_two_across_keep", ""
        if len(said) < answer.num_asked:
            is_cut = self._meets_dirt(answer)
            return "cut_short" if is_cut else "failed", f"{len(said)} of {answer.num_asked} tokens"
        return "of_one", ""

    def _verdict_on_refusal(self, answer: Answer) -> tuple[str, str]:
        if answer.status == 503 and self._meets_dirt(answer):
            return "refused", ""
        return "failed", f"status {answer.status}"

    def _wrong_order(self, answer: Answer, policies: Sequence[int]) -> tuple[str, str] | None:
        """Whether these are not policies that were served from when a request was sent, in their order."""
        served = self._served(answer)
        places, place = [], 0
        for policy in policies:
            found = next((i for i in range(place, len(served)) if served[i].policy == policy), None)
            if found is None:
                known = {attempt.policy for attempt in self._attempts if attempt.outcome == "served"}
                before = {a.policy for a in self._attempts if a.outcome == "served" and a.end_s <= answer.sent_s}
                kind = "foreign" if policy not in known else "stale" if policy in before else "mixed"
                return kind, f"{policies}, where {[each.policy for each in served]} were served"
            places.append(found)
            place = found + 1
        for first, last in pairwise(places):
            if any(each.in_flight not in FREEZES for each in served[first + 1 : last + 1]):
                return "mixed", f"{policies} across a push that keeps no requests"
        return None

    def _goes_on(self, served: Sequence[Attempt], old: int, new: int) -> bool:
        """Whether KV of a policy may be behind tokens of another: across pushes after which requests went on with theirs."""
        for place, attempt in enumerate(served):
            later = takewhile(lambda each: each.in_flight == "continue", served[place + 1 :])
            if attempt.policy == old and any(each.policy == new for each in later):
                return True
        return False

    def _served(self, answer: Answer) -> list[Attempt]:
        """The policies that were served while a request was with the server, in their order."""
        over = [attempt for attempt in self._attempts if attempt.end_s <= answer.sent_s]
        late = [a for a in self._attempts if a.end_s > answer.sent_s and a.begin_s < answer.heard_s]
        last = next((a for a in reversed(over) if a.outcome != "kept"), None)
        base = [last] if last is not None and last.outcome == "served" else []
        return base + [attempt for attempt in late if attempt.outcome == "served"]

    def _dirty_throughout(self, answer: Answer) -> bool:
        """Whether the server refused requests when this one was sent, and until it was answered."""
        over = [a for a in self._attempts if a.end_s <= answer.sent_s and a.outcome != "kept"]
        is_later = any(a.begin_s < answer.heard_s and a.end_s > answer.sent_s for a in self._attempts)
        return bool(over) and over[-1].outcome == "dirty" and not is_later

    def _meets_dirt(self, answer: Answer) -> bool:
        """Whether the server refused requests at any time while this one was with it, or might have."""
        is_dirty = False
        for attempt in self._attempts:
            if attempt.begin_s >= answer.heard_s:
                break
            if attempt.outcome == "dirty":
                is_dirty = True
            elif attempt.outcome == "served" and attempt.end_s <= answer.sent_s:
                is_dirty = False
        return is_dirty
