"""docs/zoo.md: which models refit in which engine, of what walks over engines' registries left in docs/zoo_*.json.

python -m tests.zoo_table
"""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

from fp8refit import errors

DOCS = Path(__file__).parents[1] / "docs"
TABLE = DOCS / "zoo.md"
EQUAL, SILENT, REFUSED, NOT_BOOTED = "equal", "equal, without a forward", "refused", "not booted"
WRONG, LEFT_BEHIND, FAILED = "refitted wrongly", "left something behind", "failed after it had booted"
NOT_WALKED = "not walked yet"
FAILURES = (WRONG, LEFT_BEHIND, FAILED)
"""Outcomes that fail a walk, unless `EXPECTED` names the model."""
EXPECTED: dict[tuple[str, str], str] = {}
"""Engine and architecture of each failure that is no fault of fp8refit's, and why it is none."""
MOST_PARAMETERS = 2e9
"""Of a model in a walk: two policies of it, one of them in float32 too, and an engine are in memory at once."""
UNQUANTIZED = "the engine quantizes none of its layers"
IN_BF16 = "to a boot from the BF16 checkpoint, quantized afterwards"
BACKEND = "the Transformers backend"
"""An engine's class for models that it has none of its own for."""
OUTCOMES = (EQUAL, SILENT, *FAILURES, REFUSED, NOT_BOOTED, NOT_WALKED)
_HEAD = """# Which models refit

Tested here: every causal language model that an engine's registry names and that transformers can build small, and some
vision-language models, all in block FP8 on the CPU. Each engine boots with noise and is refitted to a policy that changes every
parameter. It is then compared with a fresh engine that loaded this policy from a checkpoint, which a second quantizer wrote.
For vision-language models, the last refit sends the language model only and keeps the tower (`keep=`).

- *equal*: every byte, the tokens and the log-probabilities are equal. A few models have no usable block-FP8 checkpoint: their
  blocks in the engine are not blocks of any checkpoint, or the engine's loader takes no block scales. `quantize --like` refuses
  them and says which. They are compared with a fresh engine that loaded the BF16 checkpoint and whose weights the second
  quantizer then quantized.
- *equal, without a forward*: every byte is equal. The engine has no CPU kernels for this model, so it generated nothing.
- *refused*: the engine boots with noise. fp8refit says why it does not refit it, and writes nothing. Where the reason quotes an
  error of the model's own loader, the engine raises it for this checkpoint too.
- *not booted*: transformers cannot make the model here, or the engine cannot boot it with noise.
- *not walked yet*: not tested.

The walk fails if a model is refitted wrongly, if tracing its loader leaves anything behind in the engine, or if a step after
the boot fails.

`nox -s zoo` renders this page again. Every test run repeats a few models of each engine.
"""
_BY_RANK = re.compile(r"^(?:E\s+|\[rank\d+\]: )*")
_ERROR = re.compile(
    rf"{_BY_RANK.pattern}(?:\w+\.)*(\w*(?:Error|Exception|Failure|Interrupt))(?:: ?(.*))?$", re.MULTILINE
)
_SENTENCE = re.compile(r".+?(?=[.!?](?:\s+[A-Z]|$)|$)")
_OF_PYDANTIC = re.compile(r" \[type=\w+, input_value=.*")
_PLACE = re.compile(r"/(?:[^\s/']+/)+")
"""Of a file on the machine of a walk."""
_KILLED = "needs more time or memory than a walk has"
_REFUSALS = ("InvalidSourceError", "UnsupportedEngineError")
"""Errors of fp8refit that name what they refuse."""
_OURS = {name for name, error in vars(errors).items() if isinstance(error, type) and issubclass(error, Exception)}


class Stage(StrEnum):
    """What a scenario began last. It writes this down first, as its engine may end it."""

    MAKE = "making the model"
    BOOT = "boot from noise"
    LOOK = "tracing the loader"
    FIRST_REFIT = "first refit"
    FIRST_FORWARD = "first forward"
    REFIT = "second refit"
    FROM_FILES = "refit from files"
    QUANTIZE = "`quantize --like`"
    FRESH_BOOT = "fresh boot"

    @property
    def is_after_the_boot(self) -> bool:
        return self not in (Stage.MAKE, Stage.BOOT)


def check_is_small(architecture: str) -> None:
    """Refuse a model that transformers makes so large that it would fill the machine. Takes no memory.

    Raises:
        MemoryError: It has more than `MOST_PARAMETERS`.
    """
    import torch
    import transformers

    from tests import zoo_models, zoo_vision

    is_vision = architecture in zoo_vision.ARCHITECTURES
    config = (zoo_vision if is_vision else zoo_models).tiny_config(architecture)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MOST_PARAMETERS:
        raise MemoryError(f"transformers makes it with {num_parameters / 1e9:.1f} billion parameters here")


def ended(failure: Exception, notes: Path) -> dict[str, Any]:
    """What is known of a scenario that ended before it found anything.

    Args:
        failure: Says what it wrote.
        notes: The file where it noted its stages. There is none if it never began, which is not a model's fault.
    """
    if not notes.exists():
        raise failure
    return {"error": str(failure), "stage": Stage(notes.read_text())}


def outcome_of(found: dict[str, Any], *, speaks: bool) -> dict[str, Any]:
    """One line of the table, of what a walk found."""
    if "error" in found:
        return _outcome_of_end(found["error"], found["stage"])
    if found["left_behind"]:
        return {"outcome": LEFT_BEHIND, "why": ", ".join(found["left_behind"][:2])}
    if "refused" in found:
        return {"outcome": REFUSED, "why": _first_sentence(found["refused"])}
    (refitted, *_), (fresh, *_) = found["refitted"], found["fresh"]
    unlike = [name for name in fresh if refitted.get(name) != fresh[name]]
    if not found.get("is_quantized_alike", True):
        return {"outcome": WRONG, "why": "the checkpoint that `quantize` writes"}
    if unlike or not found["refitted"] == found["from_files"] == found["fresh"]:
        return {"outcome": WRONG, "why": f"{len(unlike)} of {len(fresh)} tensors, {', '.join(unlike[:2])}"}
    if speaks and not found["generated"] == found.get("fresh_generated", found["generated"]) != found["before"]:
        return {"outcome": WRONG, "why": "its log-probabilities"}
    num_quantized = sum(name.endswith("_scale_inv") for live in found["fresh"] for name in live)
    line = {"outcome": EQUAL if speaks else SILENT, "num_quantized": num_quantized}
    if not num_quantized:
        return line | {"why": UNQUANTIZED}
    if not found.get("no_checkpoint"):
        return line
    first = found["no_checkpoint"][0].partition("; ")[0]
    return line | {"why": f"{IN_BF16}; `quantize --like` refuses {first}"}


def _outcome_of_end(error: str, stage: Stage) -> dict[str, Any]:
    """Of a scenario that ended in `stage`. Only an engine that never ran, and not because of fp8refit, has not booted."""
    told, why = list(_ERROR.finditer(error)), shortened(error)
    is_ours = bool(told) and told[-1][1] in _OURS
    kind = FAILED if stage.is_after_the_boot or is_ours else NOT_BOOTED
    return {"outcome": kind, "why": f"{stage}: {why}" if kind == FAILED or why == _KILLED else why}


def shortened(text: str) -> str:
    """The first sentence of the last error that a text tells of, on one line."""
    told = list(_ERROR.finditer(text))
    if not told:
        return _KILLED if "ended with -9" in text else _first_sentence(text)
    kind, message = told[-1].groups()
    if message is not None and (not message or message.endswith(":") or "validation error" in message):
        message = (
            text[told[-1].end() :].lstrip("\n").partition("\n")[0]
        )  # of an error that heads a list, the first of it
    if not message:
        return kind
    said = _first_sentence(message)
    return said if kind in _REFUSALS else f"{kind}: {said}"


def _first_sentence(text: str) -> str:
    line = " ".join(_PLACE.sub("", _BY_RANK.sub("", text)).split()).removeprefix("- ").removeprefix("Value error, ")
    return _SENTENCE.match(_OF_PYDANTIC.sub("", line))[0]


def asked_of(engine: str, named: set[str], asked: str) -> list[str]:
    """Which architectures to walk to.

    Args:
        engine: Its name.
        named: By the engine, and by transformers.
        asked: `all`; `rest`, those that nobody has walked to yet; or names with commas between.
    """
    if asked not in ("all", "rest"):
        return asked.split(",")
    noted = _walk_of(engine)["models"] if asked == "rest" else {}
    return sorted(name for name in named if noted.get(name, {}).get("outcome", NOT_WALKED) == NOT_WALKED)


def write(engine: str, version: str, architecture: str, line: dict[str, Any]) -> None:
    """Note what a walk found of a model, and render the table."""
    models = _walk_of(engine)["models"] | {architecture: line}
    noted = {"engine": engine, "version": version, "models": dict(sorted(models.items()))}
    _file_of(engine).write_text(json.dumps(noted, indent=1) + "\n")
    TABLE.write_text(render())


def outcomes_of(engine: str) -> dict[str, str]:
    """What is noted of each model of an engine."""
    return {name: model["outcome"] for name, model in _walk_of(engine)["models"].items()}


def unexpected_failures(engine: str) -> dict[str, str]:
    """Failures of an engine's models that `EXPECTED` does not name."""
    outcomes = outcomes_of(engine).items()
    return {name: found for name, found in outcomes if found in FAILURES and (engine, name) not in EXPECTED}


def classes_of(engine: str) -> set[str]:
    """The engine's model classes that equal a fresh boot. Models whose `class` was noted may share one."""
    models = _walk_of(engine)["models"].items()
    return {model.get("class", name) for name, model in models if model["outcome"] in (EQUAL, SILENT)}


def _file_of(engine: str) -> Path:
    return DOCS / f"zoo_{engine.lower()}.json"


def _walk_of(engine: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_file_of(engine).read_text())
    return found


def walks() -> list[dict[str, Any]]:
    """What is noted, engine by engine."""
    return [json.loads(file.read_text()) for file in sorted(DOCS.glob("zoo_*.json"))]


def render() -> str:
    """The page."""
    found = walks()
    lines = [_HEAD]
    for walk in found:
        outcomes = [model["outcome"] for model in walk["models"].values()]
        counts = "; ".join(f"{outcomes.count(kind)} {kind}" for kind in OUTCOMES if kind in outcomes)
        num_classes = len(classes_of(walk["engine"]))
        lines += [
            f"{walk['engine']} {walk['version']}: {counts}. The equal ones belong to {num_classes} model classes.",
            "",
        ]
    names = sorted({name for walk in found for name in walk["models"]})
    lines += [f"| model | {' | '.join(walk['engine'] for walk in found)} |", f"| --- |{' --- |' * len(found)}"]
    lines += [f"| {name} | {' | '.join(_cell(walk['models'].get(name)) for walk in found)} |" for name in names]
    return "\n".join(lines) + "\n"


def _cell(model: dict[str, Any] | None) -> str:
    if model is None:
        return ""
    why = model.get("why", "").replace("|", "\\|").replace("<", "\\<")
    return f"{model['outcome']}: {why}" if why else model["outcome"]


if __name__ == "__main__":
    TABLE.write_text(render())
