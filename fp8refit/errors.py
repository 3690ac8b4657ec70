"""Every error this library raises on purpose.

An error caused by a caller's input is also a `ValueError`. Each message says what is wrong, why it is refused and what to
do.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import takewhile
from types import MappingProxyType

MOST_LINES = 20
UNEXPECTED = "unexpected, this engine has no such weight; leave it out"
MISSING = "missing"
_LONGEST_PART = 3
"""Components of a name that may be too many, or lacking, in one place."""
_PADDED = re.compile(r"(?:embed\w*|lm_head)\.weight: has shape \[(\d+)(, \d+)\], this engine's is \[(\d+)\2\]$")
"""Rows for a vocabulary, which trainers pad so that it divides by the number of ranks."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
WRITTEN_IN_PART = "The engine holds part of this policy and refuses requests until the next complete refit."
_LOOK_FIRST = 'With validate="strict", a source that can be read twice is checked before anything is written.'


def install(extra: str) -> str:
    """How to install what an extra of fp8refit has, for a message."""
    return f"pip install '.[{extra}]' in a clone of fp8refit"


class RefitError(Exception):
    """Base class of everything fp8refit raises on purpose."""


class InvalidSourceError(RefitError, ValueError):
    """The source does not fit this engine: names, shapes, dtypes, devices or scales.

    Raised before anything is written, except for problems that appear only while a stream is read. The message says what many
    names have in common, and folds what differs only in numbers.

    Attributes:
        problems: One line per problem, each naming its tensor: all of them.
        written: Whether the engine was written in part.
    """

    def __init__(self, problems: Sequence[str], *, written: bool = False) -> None:
        self.problems = tuple(problems)
        self.written = written
        self.tell({})

    def tell(self, sent: Mapping[str, str]) -> None:
        """Tell a trainer about it that has other names for some tensors."""
        count = len(self.problems)
        listing = "".join(f"\n  - {line}" for line in told(self.problems, sent))
        consequence = f"\n{WRITTEN_IN_PART}" if self.written else ""
        self.args = (f"the source cannot be used ({count} problem{'s' * (count != 1)}):{listing}{consequence}",)


class NonFiniteError(RefitError, ValueError):
    """A source tensor holds NaN or Inf (for fp32, after the cast to BF16).

    Attributes:
        names: Checkpoint names of the bad tensors.
        written: Whether the engine was written in part.
    """

    def __init__(self, names: Sequence[str], *, written: bool) -> None:
        self.names = tuple(names)
        self.written = written
        self.tell({})

    def tell(self, sent: Mapping[str, str]) -> None:
        """Tell a trainer about it that has other names for some tensors."""
        consequence = f"{WRITTEN_IN_PART} {_LOOK_FIRST}" if self.written else "Nothing was written."
        listing = ", ".join(_as_sent(name, sent) for name in self.names)
        self.args = (f"NaN or Inf in {len(self.names)} tensor(s): {listing}. {consequence}",)


class InvalidOptionError(RefitError, ValueError):
    """Options of fp8refit are unknown, or have values that are not possible. The message has a line for each."""


class InvalidCalibrationError(RefitError, ValueError):
    """This engine cannot use the calibration batch or the KV scales: no tokens, unknown token ids, a scale of zero."""


class CalibrationError(RefitError):
    """The calibration pass produced no scales: NaN or Inf in an attention layer, or not enough memory.

    During a `refit` the weights are already written. The engine refuses requests until the next complete refit.
    """


class InvalidCorrectionError(RefitError, ValueError):
    """The functions of `fp8refit.training.correction` cannot use these arguments: shapes differ, or bounds are empty."""


class UnsupportedEngineError(RefitError, ValueError):
    """fp8refit cannot refit this engine: it is unknown, or has layers whose kernel repacks weights.

    The message says each cause once, with all modules that it is true of.

    Attributes:
        reasons: One line per module: its name, why it is refused, and what to set instead.
    """

    def __init__(self, summary: str, reasons: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join([summary, *(f"  - {line}" for line in by_cause(self.reasons))]))


class CheckpointError(RefitError, ValueError):
    """A checkpoint cannot be quantized, or the result cannot be written.

    Attributes:
        problems: One line per problem.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  - {problem}" for problem in self.problems)]))


class PrecisionError(RefitError, ValueError):
    """A trainer cannot compute in the engine's precision: weights, layers or formats differ. Nothing was changed.

    Attributes:
        problems: One line per problem, each naming its tensor.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(["trainer and engine cannot share a precision:", *(f"  - {line}" for line in problems)])
        )


class EngineBusyError(RefitError):
    """The engine has unfinished requests, or another refit of it is running."""


class EngineAsleepError(RefitError):
    """The engine sleeps, so its weights are not mapped: writing them would be a fatal CUDA fault."""


class EngineDirtyError(RefitError):
    """The engine holds a mixture of two policies and refuses requests until a complete refit."""


class DifferentPolicyError(RefitError):
    """The engine does not hold the policy that it was compared with.

    Attributes:
        names: Checkpoint names of the tensors that differ.
    """

    def __init__(self, summary: str, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        super().__init__(
            "\n".join([summary, *(f"  - {line}" for line in told([f"{name}: differs" for name in names]))])
        )


class LiveTensorMovedError(RefitError):
    """A live tensor moved, or changed shape, stride or dtype, while it was being refitted."""


class CacheFlushError(RefitError):
    """The engine did not drop the KV cache of the previous policy."""


class StaleCacheError(RefitError, ValueError):
    """A request brings a KV cache computed under another policy."""


class StagingMemoryError(RefitError):
    """The engine's device has no room for the staging buckets."""


class RankFailedError(RefitError):
    """A rank of the engine or of the trainer failed with an error that is not a `RefitError`. The message quotes it.

    Raised on every rank. If anything was written, the engine is dirty until the next complete refit.
    """


class TensorsForgottenError(RankFailedError):
    """A rank no longer knows the tensors of this driver's last refit, such as after another driver's. They are then sent again
    in full, so callers see this only if that fails too.
    """


class TransportError(RefitError):
    """An engine rank cannot reach the trainer's tensors."""


class EngineLostError(RefitError):
    """The engine cannot be repaired: a CUDA fault, or a rank that died or does not answer. Restart it."""


def told(problems: Sequence[str], sent: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Lines for people, at most `MOST_LINES` and a few.

    Args:
        problems: `NAME: what is wrong with it`.
        sent: The trainer's name of a tensor, where it has another one.

    Examples:
        >>> for line in told([f"actor.layers.{i}.weight: {UNEXPECTED}" for i in range(30)]
        ...                  + [f"layers.{i}.weight: missing" for i in range(30)]):
        ...     print(line)
        30 of 30 unexpected names begin with `actor.` and fit without it; pass rename=("actor.", "")
    """
    names: dict[str, list[str]] = {UNEXPECTED: [], MISSING: []}
    for name, what in map(_split, problems):
        names.get(what, []).append(name)
    found = list(_in_common(names[UNEXPECTED], names[MISSING], sent))
    explained = {name for _, some in found for name in some}
    lines = []
    for problem in problems:
        name, what = _split(problem)
        if what in names and name in explained:
            continue
        padded = _PADDED.search(problem)
        advice = (
            f"; cut the rows of padding, tensor[:{padded[3]}]" if padded and int(padded[1]) > int(padded[3]) else ""
        )
        lines.append((problem.replace(name, _as_sent(name, sent), 1) if name in sent else problem) + advice)
    if len(lines) > MOST_LINES:
        lines = fold(lines)
    shown, rest = lines[:MOST_LINES], lines[MOST_LINES:]
    if rest:
        shown.append(f"... and {len(rest)} more lines; `problems` of this error has all {len(problems)}")
    unexpected, missing = ([name for name in some if name not in explained] for some in names.values())
    if missing and not unexpected:
        shown.append("if the trainer never changes what is missing, name it in keep=, and the engine keeps its values")
    elif unexpected and not missing:
        shown.append("what is sent too much may come if ignore= names it")
    return [*(line for line, _ in found), *shown]


def prefixes_for(name: str, needed: Collection[str]) -> str | None:
    """The text of the prefixes to rename so that an unexpected name is a needed one; None if none does.

    Examples:
        >>> prefixes_for("actor.norm.weight", ["norm.weight", "head.weight"])
        'actor.='
    """
    added, lacking = _part([name], needed), _part(needed, [name])
    pairs = added.pairs([name], is_added=True) if added else lacking.pairs([name], is_added=False) if lacking else ()
    return ",".join(f"{old}={new}" for old, new in pairs) or None


def by_cause(reasons: Iterable[str]) -> list[str]:
    """One line for all names that have the same problem.

    Examples:
        >>> by_cause([f"layers.{i}.{part}: its kernel repacks" for i in range(3) for part in ("up", "down")])
        ['layers.{0..2}.up (3 names), layers.{0..2}.down (3 names): its kernel repacks']
    """
    causes: dict[str, list[str]] = {}
    for name, what in map(_split, reasons):
        causes.setdefault(what, []).append(name)
    alone = fold(causes.pop("", ()))
    return [*(f"{', '.join(fold(names))}: {what}" for what, names in causes.items()), *alone]


def fold(problems: Iterable[str]) -> list[str]:
    """One line for all names that differ in numbers only and have the same problem, in the order of the first ones.

    Examples:
        >>> fold(["layers.0.w: missing", "layers.1.w: missing", "norm.w: missing"])
        ['layers.{0..1}.w: missing (2 names)', 'norm.w: missing']
    """
    alike: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for name, what in map(_split, problems):
        numbers = tuple(map(int, _NUMBER.findall(name)))
        alike.setdefault((_NUMBER.sub("{}", name), what), []).append(numbers)
    return [_folded(pattern, what, numbers) for (pattern, what), numbers in alike.items()]


def _folded(pattern: str, what: str, found: Sequence[tuple[int, ...]]) -> str:
    ranges = (_said(sorted(set(numbers))) for numbers in zip(*found, strict=True))
    name = pattern
    for said in ranges:
        name = name.replace("{}", said, 1)
    count = f" ({len(found)} names)" if len(found) > 1 else ""
    return f"{name}: {what}{count}" if what else f"{name}{count}"


def _said(numbers: Sequence[int]) -> str:
    """Numbers, ascending, as in a shell."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    if len(numbers) == last - first + 1:
        return f"{{{first}..{last}}}"
    return f"{{{','.join(map(str, numbers[:3]))}{',...' if len(numbers) > 3 else ''}}}"


def _split(problem: str) -> tuple[str, str]:
    name, _, what = problem.partition(": ")
    return name, what


def _as_sent(name: str, sent: Mapping[str, str]) -> str:
    return f"{name} (sent as {sent[name]})" if name in sent else name


def _in_common(
    unexpected: Sequence[str], missing: Sequence[str], sent: Mapping[str, str]
) -> Iterator[tuple[str, Collection[str]]]:
    """Say what most names have too much, or lack, compared with those that the engine needs, and what to do; and of which."""
    if not unexpected or not missing:
        return
    if part := _part(unexpected, missing):
        said = f"{len(part.longer)} of {len(unexpected)} unexpected names {part.where} and fit without it"
    elif part := _part(missing, unexpected):
        said = f"{len(part.longer)} of {len(missing)} missing names {part.where} and were sent without it"
    elif shifted := _shifted(unexpected, missing):
        yield shifted, (*unexpected, *missing)
        return
    explained: Collection[str] = ()
    if part:
        is_added = part.longer[0] in unexpected
        remedy, explained = _remedy(part, unexpected, missing, sent, is_added=is_added)
        yield f"{said}; {remedy}", explained
    left, lacking = ([name for name in names if name not in explained] for names in (unexpected, missing))
    yield from _misspelt(left, lacking, part)


def _misspelt(
    unexpected: Sequence[str], missing: Sequence[str], part: "_Part | None"
) -> Iterator[tuple[str, Collection[str]]]:
    """Say which names are nearly missing ones, once for all that differ in numbers only."""
    sent, needed = (dict[str, list[str]](), dict[str, list[str]]())
    for names, kinds in ((unexpected, sent), (missing, needed)):
        for name in names:
            kinds.setdefault(_NUMBER.sub("{}", name), []).append(name)
    if max(len(sent), len(needed)) > MOST_LINES:
        return
    for kind, names in sent.items():
        as_needed = kind.replace(part.part, "", 1) if part else kind
        for closest in get_close_matches(as_needed, needed, n=1, cutoff=0.9):
            count = f" ({len(names)} names)" if len(names) > 1 else ""
            said = f"{names[0]} is unexpected, and {needed[closest][0]} is missing: is it misspelt?{count}"
            yield said, (*names, *needed[closest])


@dataclass(slots=True)
class _Part:
    """What names have that others lack, in one place; and both."""

    where: str
    part: str
    front: str | None
    """What comes before it; None if that differs, or if it is a suffix."""
    longer: list[str] = field(default_factory=list)
    shorter: list[str] = field(default_factory=list)

    def pairs(self, unexpected: Sequence[str], *, is_added: bool) -> list[tuple[str, str]]:
        """Prefixes to rename, so that no name changes that fits as it is; none if it has no one place."""
        if self.front is None:
            return []
        long, short = self.front + self.part, self.front
        old, names = (long, self.longer) if is_added else (short, self.shorter)
        ends = {""}
        others = sum(name.startswith(old) for name in unexpected) - len(names)
        if not old or 2 * others > len(names) * is_added:  # some that are misspelt fit neither way
            ends = {"".join(name[len(old) :].partition(".")[:2]) for name in names}
        return [(long + end, short + end) if is_added else (short + end, long + end) for end in sorted(ends)]


def _part(longer: Collection[str], shorter: Collection[str]) -> _Part | None:
    """What has to be left out of most of the longer names so that they are shorter ones."""
    others, found = frozenset(shorter), dict[str, _Part]()
    for name in longer:
        pieces = name.split(".")
        for first, end in _stretches(len(pieces)):
            if (rest := ".".join(pieces[:first] + pieces[end:])) in others:
                part, front = ".".join(pieces[first:end]), None
                if end == len(pieces):
                    where = f"end with `.{part}`"
                else:
                    where = f"have `{part}.` in them" if first else f"begin with `{part}.`"
                    if not any(map(str.isdecimal, pieces[:first])):
                        front = "".join(f"{piece}." for piece in pieces[:first])
                one = found.setdefault(where, _Part(where, part + "." * (end < len(pieces)), front))
                one.front = front if front == one.front else None
                one.longer.append(name)
                one.shorter.append(rest)
                break
    most = max(found.values(), key=lambda one: len(one.longer), default=None)
    return most if most is not None and 2 * len(most.longer) >= min(len(longer), len(shorter)) else None


def _remedy(
    part: _Part, unexpected: Sequence[str], missing: Sequence[str], sent: Mapping[str, str], *, is_added: bool
) -> tuple[str, Collection[str]]:
    """What makes what was sent fit, such as options to pass; and the names that it is for."""
    explained = {*part.longer, *part.shorter}
    pairs = part.pairs(unexpected, is_added=is_added)
    if not pairs and is_added:
        made = f"replace('.{part.part}', '.')" if part.part[-1] == "." else f"removesuffix('.{part.part}')"
        return f"pass rename=lambda name: name.{made}", explained
    if not pairs:
        return "send them with it", explained
    said = ", ".join(f'("{old}", "{new}")' for old, new in pairs)
    said = f"add {said} to rename=" if sent else f"pass rename={said if len(pairs) == 1 else f'({said})'}"
    more, lacking = ([name for name in names if name not in explained] for names in (unexpected, missing))
    if bool(more) != bool(lacking) and (pattern := _pattern(more or lacking, explained)):
        said += f' and ignore="{pattern}"' if more else f' and keep="{pattern}" if these never change'
        explained.update(more, lacking)
    return said, explained


def _pattern(names: Sequence[str], others: Iterable[str]) -> str | None:
    """A pattern for all of some names, which are more than one, and none of the others."""
    ends = zip(min(names).split("."), max(names).split("."), strict=False)
    front = "".join(f"{piece}." for piece, other in takewhile(lambda pair: pair[0] == pair[1], ends))
    return f"{front}*" if front and len(names) > 1 and not any(name.startswith(front) for name in others) else None


def _stretches(length: int) -> Iterator[tuple[int, int]]:
    """Parts of a name of some components, the first ones first."""
    for first in range(length):
        for end in range(first + 1, min(first + _LONGEST_PART, length) + 1):
            if end - first < length:
                yield first, end


def _shifted(unexpected: Sequence[str], missing: Sequence[str]) -> str | None:
    """Say that the same names were sent with another number: layers are counted from 1, or there are others."""
    sent, needed = ({_NUMBER.sub("{}", name) for name in names} for names in (unexpected, missing))
    numbers = [{_NUMBER.findall(name)[0] for name in names if _NUMBER.search(name)} for names in (unexpected, missing)]
    if sent != needed or any(len(found) != 1 for found in numbers):
        return None
    (one,), (other,) = numbers
    return f"layers are shifted: those of number {one} were sent, and those of number {other} are missing"
