"""An extension of Griffe: show the descriptions of fields that their annotations declare.

Griffe reads sources. The decorator `documented` adds the descriptions to a docstring
when its module is imported, so the docstring is taken from there.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class DeclaredFields(griffe.Extension):
    """Show fields of decorated classes by their types and descriptions, without other metadata."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Change a class that has the decorator `documented`."""
        decorators = {str(decorator.value) for decorator in cls.decorators}
        if "documented" not in decorators or cls.docstring is None:
            return
        module = importlib.import_module(cls.module.path)
        cls.docstring.value = (
            inspect.getdoc(getattr(module, cls.name)) or cls.docstring.value
        )
        for field in cls.members.values():
            annotation = getattr(field, "annotation", None)
            if (
                isinstance(annotation, griffe.ExprSubscript)
                and str(annotation.left) == "Annotated"
            ):
                assert isinstance(annotation.slice, griffe.ExprTuple)
                field.annotation = annotation.slice.elements[0]
