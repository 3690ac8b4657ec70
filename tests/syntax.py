"""Finds a piece of Python by its syntax, and replaces it: the lines around it stay where they are.

Layout, comments and quotes do not matter. A body of `...` stands for any body: `if due: ...` is every `if due`, without
`else`. In what replaces it, each `...` is the body that was there.
"""

import ast
from collections.abc import Iterator
from itertools import accumulate, chain
from textwrap import dedent
from typing import TypeAlias

Nodes: TypeAlias = list[ast.stmt] | list[ast.expr]
"""Statements that follow each other, or one expression."""


def replace(source: str, scope: str, before: str, after: str) -> str:
    """The source with `after` for `before`, which stands in `scope` exactly once. Without `after`, it does nothing.

    Both are expressions, or both are statements. What is within an f-string is not found: name all of it.

    Args:
        source: A module.
        scope: `Class.method`, or nothing: all of the module.
        before: What to look for.
        after: What to put there.

    Raises:
        ValueError: No such scope, or not exactly one such piece.
    """
    before, after = dedent(before).strip(), dedent(after).strip()
    tree = ast.parse(source)
    scopes = [node for name, node in functions(tree) if name == scope] if scope else [tree]
    old, new = ast.parse(before).body, ast.parse(after or "pass").body
    is_value = _is_expression(old) and (not after or _is_expression(new))
    found = [(at, bodies) for at in _pieces(scopes, len(old), is_value) if (bodies := _match(old, at)) is not None]
    if len(found) != 1:
        raise ValueError(f"{before!r} stands {len(found)} times in {scope or 'the module'}")
    nodes, bodies = found[0]
    return put(source, nodes, after or ("None" if is_value else "pass"), bodies)


def put(source: str, nodes: Nodes, after: str, bodies: list[list[ast.stmt]] | None = None) -> str:
    """The source with other code for these nodes of its tree; each `...` in it is one of the bodies."""
    text = source.encode()
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    lines = source.split("\n")
    first, last = nodes[0], nodes[-1]
    line = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", ()))])
    begin = starts[line - 1] + first.col_offset
    end = starts[last.end_lineno - 1] + last.end_col_offset
    code = ast.unparse(ast.parse(after))
    missing = "\n" * (text.count(b"\n", begin, end) - code.count("\n"))
    if isinstance(first, ast.expr):
        new = f"({code}{missing})"
    else:
        indent, left = " " * first.col_offset, list(bodies or [])
        made = []
        for row in code.split("\n"):
            if row.strip() == "..." and left:
                body = left.pop(0)
                shift = len(indent + row) - len("...") - body[0].col_offset
                kept = lines[body[0].lineno - 1 : body[-1].end_lineno]
                made += [" " * shift + old if shift > 0 and old else old[-shift:] for old in kept]
            else:
                made.append(indent + row)
        made = "\n".join(made)[len(indent) :]
        is_branch = text[begin:].startswith(b"elif") and made.startswith("if ")
        new = "el" * is_branch + made + "\n" * (text.count(b"\n", begin, end) - made.count("\n"))
    return (text[:begin] + new.encode() + text[end:]).decode()


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every class and function, by its qualified name."""
    for child in ast.iter_child_nodes(tree):
        is_named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        name = prefix + child.name if is_named else prefix
        if is_named:
            yield name, child
        yield from functions(child, f"{name}." if is_named else prefix)


def _is_expression(body: list[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], ast.Expr)


def _pieces(scopes: list[ast.AST], count: int, is_value: bool) -> Iterator[Nodes]:
    """Every expression, or every run of so many statements."""
    for node in chain.from_iterable(map(walk, scopes)):
        if is_value and isinstance(node, ast.expr):
            yield [node]
        for name, value in ast.iter_fields(node):
            if not is_value and isinstance(value, list) and name in ("body", "orelse", "finalbody"):
                yield from (value[at : at + count] for at in range(len(value) - count + 1))


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those within f-strings, of which Python 3.11 does not know where they stand."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from walk(child)


def _match(old: list[ast.stmt], nodes: Nodes) -> list[list[ast.stmt]] | None:
    """The bodies that `...` stands for, or None if the nodes are others."""
    bodies: list[list[ast.stmt]] = []
    wanted = [each.value for each in old] if isinstance(nodes[0], ast.expr) else old
    return bodies if _is_same(wanted, nodes, bodies) else None


def _is_same(old: object, node: object, bodies: list[list[ast.stmt]]) -> bool:
    if isinstance(old, ast.AST):
        names = [name for name in old._fields if name not in ("ctx", "kind", "type_comment")]
        is_alike = type(old) is type(node)
        return is_alike and all(_is_same(getattr(old, each), getattr(node, each), bodies) for each in names)
    if isinstance(old, list):
        if isinstance(node, list) and node and isinstance(node[0], ast.stmt) and _is_any(old) and not _is_any(node):
            bodies.append(node)
            return True
        return len(old) == len(node) and all(_is_same(a, b, bodies) for a, b in zip(old, node, strict=True))
    return type(old) is type(node) and old == node


def _is_any(body: list[ast.stmt]) -> bool:
    return _is_expression(body) and isinstance(body[0].value, ast.Constant) and body[0].value.value is ...
