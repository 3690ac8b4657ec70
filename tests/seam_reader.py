"""Reads in an engine's source, which need not run or be installed, whether it has what an adapter reaches for.

A name is followed through modules, what they import from each other, classes and their bases. Where a seam says how a
function is called, its signature has to take the call.
"""

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path

import pytest

from fp8refit.live.seams import Seam

Found = tuple[str, ast.AST | None]
"""A module, and what was found in it; None for the module itself."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def assert_is_known(engine: str, seams: Iterable[Seam], since: Mapping[str, str]) -> None:
    """An engine lacks nothing but what its version is too old for.

    Args:
        engine: Its package. `FP8REFIT_VLLM_WHEEL`, for vLLM, names a folder where a wheel is unpacked.
        seams: The adapter's table.
        since: The first version that has what older ones go without, by purpose.
    """
    wheel, spec = os.environ.get(f"FP8REFIT_{engine.upper()}_WHEEL"), find_spec(engine)
    if not wheel and spec is None:
        pytest.skip(f"needs {engine}, or a wheel of it")
    root = Path(wheel or Path(spec.origin).parents[1])
    version = version_in(root, engine)
    lacking = {seam.purpose: lacks for seam in seams if (lacks := what_lacks(root, [seam]))}
    too_old = {purpose for purpose, first in since.items() if numbers(version) < numbers(first)}
    assert lacking.keys() == too_old, f"{engine} {version}: {lacking}"


def version_in(root: Path, engine: str) -> str:
    """The version that a folder's metadata says."""
    (folder,) = (path for path in root.glob("*.dist-info") if re.match(rf"{engine}(_cpu)?-\d", path.name))
    return folder.name.removesuffix(".dist-info").partition("-")[2]


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def what_lacks(root: Path, seams: Iterable[Seam]) -> dict[str, str]:
    """Names of seams that the source under `root` lacks or does not take as they are used, and why."""
    source, lacking = Source(root), {}
    for name in (name for seam in seams for name in seam.names):
        problems = [source.problem(alternative) for alternative in name.split(" | ")]
        if all(problems):
            lacking[name] = "; ".join(problems)
    return lacking


class Source:
    """The packages in a folder: an environment's `site-packages`, or an unpacked wheel."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tree = cache(self._parse)

    def problem(self, name: str) -> str:
        """What is wrong with one name; nothing if it is there, and is called as its source says."""
        dotted, is_call, arguments = name.removesuffix(")").partition("(")
        owner, is_instance, attribute = name.partition("().")
        if is_instance:
            found = self.find(owner)
            return (
                "" if found and self._of_instance(found, attribute) else f"{owner} gives its instances no {attribute}"
            )
        found = self.find(dotted)
        if found is None:
            return f"there is no {dotted}"
        return self._misfit(found, f"f({arguments})") if is_call else ""

    def find(self, dotted: str) -> Found | None:
        """A module, or what it or a class of it defines."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            if self._tree(module) is not None:
                found: Found | None = (module, None)
                for name in parts[end:]:
                    found = self._member(found, name) if found else None
                return found
        return None

    def _parse(self, module: str) -> ast.Module | None:
        path = self._root.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                return ast.parse(file.read_text())
        return None

    def _member(self, owner: Found, name: str) -> Found | None:
        module, node = owner
        if node is None:
            return self._global(module, name)
        if not isinstance(node, ast.ClassDef):
            return None
        for place, each in self._bases(owner):
            named = [one for one in _statements(each.body) if name in _names(one)]
            if named:
                return place, named[-1]
        return None

    def _global(self, module: str, name: str) -> Found | None:
        # The last, but if it is defined in several ways, as a function or class.
        last_first = reversed(list(_statements(self._tree(module).body)))
        for node in sorted(last_first, key=lambda one: not isinstance(one, (*_FUNCTIONS, ast.ClassDef))):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.find(f"{self._imported(module, node)}.{alias.name}")
            elif name in _names(node):
                return module, node
        return self.find(f"{module}.{name}") if self._tree(f"{module}.{name}") else None

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        is_package = self._root.joinpath(*module.split("."), "__init__.py").exists()
        parts = module.split(".")
        above = parts[: len(parts) - node.level + is_package]
        return ".".join([*above, *filter(None, [node.module])])

    def _bases(self, owner: Found) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and all that it derives from, as far as the source has them."""
        module, node = owner
        yield module, node
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self._global(module, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                yield from self._bases(found)

    def _of_instance(self, owner: Found, attribute: str) -> bool:
        stored = (
            node.attr
            for _, each in self._bases(owner)
            for node in ast.walk(each)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        )
        return attribute in stored or self._member(owner, attribute) is not None

    def _misfit(self, found: Found, call: str) -> str:
        """Why a function or a class cannot be called so; nothing if it can."""
        signature = self._signature(found)
        asked = ast.parse(call, mode="eval").body
        try:
            if signature is not None:
                signature.bind(*asked.args, **{keyword.arg: None for keyword in asked.keywords})
        except TypeError as error:
            return f"{call[2:-1] or 'no argument'} does not fit {signature}: {error}"
        return ""

    def _signature(self, found: Found) -> Signature | None:
        _, node = found
        if isinstance(node, _FUNCTIONS):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            return _signature_of(node, is_bound="classmethod" in decorators)
        if not isinstance(node, ast.ClassDef):
            return None
        init = self._member(found, "__init__")
        if init is not None:
            return _signature_of(init[1], is_bound=True)
        fields = {
            one.target.id: Parameter(
                one.target.id, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if one.value is None else None
            )
            for _, each in reversed(list(self._bases(found)))
            for one in each.body
            if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation)
        }
        return Signature(sorted(fields.values(), key=lambda field: field.default is None)) if fields else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, also under a condition."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, part, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _names(node: ast.stmt) -> set[str]:
    """What a statement defines."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _signature_of(node: ast.AST, *, is_bound: bool) -> Signature:
    given = node.args
    places = [*given.posonlyargs, *given.args]
    num_required = len(places) - len(given.defaults)
    parameters = [
        Parameter(
            each.arg,
            Parameter.POSITIONAL_ONLY if each in given.posonlyargs else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if place < num_required else None,
        )
        for place, each in enumerate(places)
    ][is_bound:]
    if given.vararg:
        parameters.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        empty = Parameter.empty if default is None else None
        parameters.append(Parameter(each.arg, Parameter.KEYWORD_ONLY, default=empty))
    if given.kwarg:
        parameters.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)
