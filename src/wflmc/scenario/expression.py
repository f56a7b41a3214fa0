"""Arithmetic in μ, L and the round for the step size, parsed and never run as code."""

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError

Value = float | NDArray[np.float64]

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[[Any, Any], Any]] = {"min": np.minimum, "max": np.maximum}


def evaluate_expression(key: str, text: str, names: Mapping[str, Value]) -> Value:
    """Return the value of an expression of numbers, + - * / **, brackets, min, max and names, of numbers or arrays.

    A comparison (< <= > >=) is 1 where it holds and 0 elsewhere.

    >>> evaluate_expression("step_size", "0.4/(mu+L)", {"mu": 1.0, "L": 3.0})
    0.1
    >>> evaluate_expression("step_size", "min(0.2, 0.1*(1+3*(s<=2)))", {"s": np.arange(1.0, 5.0)})
    array([0.2, 0.2, 0.1, 0.1])
    """
    allowed = f"a number, or arithmetic (+ - * / **, brackets, min, max and < <= > >=) in {', '.join(names)}"

    def value(node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=number) if isinstance(number, int | float) and not isinstance(number, bool):
                return float(number)
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) if type(op) in _OPERATORS:
                result = _OPERATORS[type(op)](value(left), value(right))
                if not isinstance(result, complex):
                    return 1.0 * result
            case ast.Call(func=ast.Name(id=name), args=[_, *_] as parts, keywords=[]) if name in _CALLS:
                return functools.reduce(_CALLS[name], map(value, parts))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                return -value(operand) if isinstance(sign, ast.USub) else value(operand)
        raise ValueError

    if len(text) > 200:
        raise InputError(key, text, "at most 200 characters long")
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        raise InputError(key, text, allowed) from None
