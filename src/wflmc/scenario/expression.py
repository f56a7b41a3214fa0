"""Arithmetic in μ and L for the step size, parsed and never run as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from wflmc.errors import InputError

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def evaluate_expression(key: str, text: str, names: Mapping[str, float]) -> float:
    """Value of an expression of numbers, + - * / **, brackets and the given names.

    >>> evaluate_expression("step_size", "0.4/(mu+L)", {"mu": 1.0, "L": 3.0})
    0.1
    """
    allowed = f"a number, or arithmetic (+ - * / ** and brackets) in {' and '.join(names)}"

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=number) if isinstance(number, int | float) and not isinstance(number, bool):
                return float(number)
            case ast.Name(id=name) if name in names:
                return float(names[name])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                result = _BINARY[type(op)](value(left), value(right))
                if isinstance(result, complex):
                    raise ValueError
                return result
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return value(operand)
        raise ValueError

    if len(text) > 200:
        raise InputError(key, text, "at most 200 characters long")
    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        raise InputError(key, text, allowed) from None
