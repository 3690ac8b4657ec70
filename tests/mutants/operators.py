"""The mutants of a module: each changes one expression or statement, as a slip of the pen would."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests import syntax

COMPARISONS = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    path: str
    operator: str
    node: ast.expr | ast.stmt
    after: str
    """What stands in place of the node."""

    @property
    def lines(self) -> range:
        return range(self.node.lineno, self.node.end_lineno + 1)

    @property
    def key(self) -> tuple[str, int, int, str, str]:
        return self.path, self.node.lineno, self.node.col_offset, self.operator, self.after

    def source(self, text: str) -> str:
        """The module with it."""
        return syntax.put(text, [self.node], self.after)


def mutants(text: str, path: str) -> list[Mutant]:
    """All of a module, in the order of its nodes."""
    return [
        Mutant(path=path, operator=operator, node=place, after=after)
        for node in _nodes(ast.parse(text))
        for operator, place, after in _changes(node)
    ]


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What may change: no annotation, decorator, f-string or Triton kernel, and nothing that only a type checker reads."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield child
                yield from _nodes(child)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(decorator_list=decorators):
            return any("jit" in ast.unparse(decorator) for decorator in decorators)
        case ast.If(test=ast.Name("TYPE_CHECKING")) | ast.AnnAssign(annotation=ast.Name("TypeAlias")):
            return True
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr():
            return True
        case ast.BinOp(left, ast.BitOr(), right):
            return _is_class(left) or _is_class(right)
        case ast.BinOp(ast.Constant(str()) | ast.JoinedStr()) | ast.BinOp(right=ast.Constant(str()) | ast.JoinedStr()):
            return True
    return False


def _is_class(node: ast.expr) -> bool:
    name = ast.unparse(node).rpartition(".")[2]
    return name[:1].isupper() and not name.isupper()


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """The name of each operator that fits, the node that it replaces, and what it puts there."""
    match node:
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield "negation", test, f"not ({ast.unparse(test)})"
        case ast.comprehension(ifs=tests):
            yield from (("filter", test, "True") for test in tests)
        case ast.Compare(left, [operator], [right]):
            for other in COMPARISONS[type(operator)]:
                yield "comparison", node, ast.unparse(ast.Compare(left, [other()], [right]))
        case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC:
            yield "arithmetic", node, ast.unparse(ast.BinOp(left, ARITHMETIC[type(operator)](), right))
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "and/or", node, ast.unparse(ast.BoolOp(other, values))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield "drop not or minus", node, ast.unparse(operand)
        case ast.Constant(bool(value)):
            yield "boolean", node, str(not value)
        case ast.Constant(int(value) | float(value)):
            yield "constant", node, repr(value + 1)
        case ast.Break():
            yield "break/continue", node, "continue"
        case ast.Continue():
            yield "break/continue", node, "break"
        case ast.Return(ast.Constant(None)) | ast.Return(None):
            return
        case ast.Return():
            yield "return None", node, "return None"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "drop statement", node, "pass"
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "drop statement", node, "pass"
