"""An extension of Griffe: show the descriptions of fields that their annotations
declare.

Griffe reads sources. The decorator `documented` adds the descriptions to a docstring
when its module is imported, so the docstring is taken from there.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class DeclaredFields(griffe.Extension):
    """Show fields of decorated classes by their types and descriptions alone."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Change a class that has the decorator `documented`."""
        decorators = {str(decorator.value) for decorator in cls.decorators}
        if "documented" not in decorators or cls.docstring is None:
            return
        module = importlib.import_module(cls.module.path)
        imported_docstring = inspect.getdoc(getattr(module, cls.name))
        if imported_docstring:
            cls.docstring.value = imported_docstring
        for field in cls.members.values():
            _show_type_alone(field)


def _show_type_alone(field: Any) -> None:
    """Replace `Annotated[type, …]` by the type in what the page shows."""
    annotation = getattr(field, "annotation", None)
    if not isinstance(annotation, griffe.ExprSubscript):
        return
    if str(annotation.left) == "Annotated":
        assert isinstance(annotation.slice, griffe.ExprTuple)
        field.annotation = annotation.slice.elements[0]
