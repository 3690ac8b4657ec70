"""docs/zoo.md: which models refit in which engine, of what walks over engines' registries left in docs/zoo_*.json.

python -m tests.zoo_table
"""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
TABLE = DOCS / "zoo.md"
EQUAL, SILENT, REFUSED, NOT_BOOTED = "equal", "equal, without a forward", "refused", "not booted"
WRONG = "refitted wrongly"
NOT_WALKED = "not walked yet"
IN_BF16 = "to a boot from the BF16 checkpoint, quantized afterwards"
BACKEND = "the Transformers backend"
"""An engine's class for models that it has none of its own for."""
OUTCOMES = (EQUAL, SILENT, WRONG, REFUSED, NOT_BOOTED, NOT_WALKED)
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
- *refused*: the engine loads the model. fp8refit says why it does not refit it, and writes nothing.
- *not booted*: the engine or transformers does not load the model here.
- *not walked yet*: not tested.

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
_OUT_OF_TIME = "does not come to an end in the time that a walk gives it"
_OURS = ("InvalidSourceError", "UnsupportedEngineError")


def outcome_of(found: dict[str, Any], *, speaks: bool) -> dict[str, Any]:
    """One line of the table, of what a walk found."""
    if "error" in found:
        is_refused = any(said in found["error"] for said in ("cannot be refitted", *_OURS))
        kind = REFUSED if is_refused else NOT_BOOTED
        return {"outcome": kind, "why": shortened(found["error"])}
    (refitted, *_), (fresh, *_) = found["refitted"], found["fresh"]
    unlike = [name for name in fresh if refitted.get(name) != fresh[name]]
    if not found.get("is_quantized_alike", True):
        return {"outcome": WRONG, "why": "the checkpoint that `quantize` writes"}
    if unlike or not found["refitted"] == found["from_files"] == found["fresh"]:
        return {"outcome": WRONG, "why": f"{len(unlike)} of {len(fresh)} tensors, {', '.join(unlike[:2])}"}
    if speaks and not found["generated"] == found.get("fresh_generated", found["generated"]) != found["before"]:
        return {"outcome": WRONG, "why": "its log-probabilities"}
    num_quantized = sum(name.endswith("_scale_inv") for live in found["fresh"] for name in live)
    assert num_quantized
    line = {"outcome": EQUAL if speaks else SILENT, "num_quantized": num_quantized}
    if not found.get("no_checkpoint"):
        return line
    first = found["no_checkpoint"][0].partition("; ")[0]
    return line | {"why": f"{IN_BF16}; `quantize --like` refuses {first}"}


def shortened(text: str) -> str:
    """The first sentence of the last error that a text tells of, on one line."""
    told = list(_ERROR.finditer(text))
    if not told:
        is_late = "ended with -9" in text
        return _OUT_OF_TIME if is_late else _first_sentence(text.removeprefix("cannot be refitted: "))
    kind, message = told[-1].groups()
    if message is not None and (not message or message.endswith(":") or "validation error" in message):
        message = (
            text[told[-1].end() :].lstrip("\n").partition("\n")[0]
        )  # of an error that heads a list, the first of it
    if not message:
        return kind
    said = _first_sentence(message)
    return said if kind in _OURS else f"{kind}: {said}"


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


def outcomes_of(engine: str) -> list[str]:
    """What is noted of all models of an engine."""
    return [model["outcome"] for model in _walk_of(engine)["models"].values()]


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
