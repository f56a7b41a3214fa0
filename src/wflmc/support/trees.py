"""Types of nested values: pytrees of arrays, and documents as JSON writes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

ArrayTree: TypeAlias = (
    ArrayLike | Mapping[str, "ArrayTree"] | Sequence["ArrayTree"] | None
)
"""A pytree of arrays and numbers: one of them, or named or numbered trees of them.

Registered containers, such as the modules of Flax and Equinox, are pytrees as well, but
no Python type tells them from other objects: a function that takes these takes
`object`.
"""

NumericArray: TypeAlias = jax.Array | np.ndarray
"""An array of JAX or of NumPy, where either will do."""

Values: TypeAlias = Mapping[str, NumericArray]
"""Arrays by name, such as the values of a model's parameters by site."""

JsonValue: TypeAlias = (
    str | int | float | bool | list["JsonValue"] | dict[str, "JsonValue"] | None
)
"""What a JSON file may hold."""

JsonObject: TypeAlias = dict[str, JsonValue]
"""A JSON object."""

DrawFunction: TypeAlias = Callable[..., jax.Array]
"""A function of the parameters of one draw, in the pytree that its model has."""
