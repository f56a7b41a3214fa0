"""A real federation on Flower.

The server holds θ, the plan and the ledger, each device its own data.
"""

from importlib import import_module
from importlib.util import find_spec

_NAMES_BY_MODULE = {
    "device": ("Device", "client_app"),
    "job": ("make_job",),
    "messages": ("Terms",),
    "server": ("open_server", "run_in_process", "trace_of"),
}
"""Where names are defined; `__init__.pyi` says the same to type checkers."""
__all__ = sorted(name for names in _NAMES_BY_MODULE.values() for name in names)


def __getattr__(name: str) -> object:
    """Import a name or a module when it is used first.

    Modules of this package are also commands, of which Python warns where the package
    has imported them before.
    """
    for module, names in _NAMES_BY_MODULE.items():
        if name in names:
            defining_module = import_module(f"wflmc.apps.federation.{module}")
            value = getattr(defining_module, name)
            globals()[name] = value
            return value
    if name.startswith("_") or find_spec(f"wflmc.apps.federation.{name}") is None:
        raise AttributeError(
            f"module 'wflmc.apps.federation' has no attribute {name!r}"
        )
    return import_module(f"wflmc.apps.federation.{name}")


def __dir__() -> list[str]:
    return __all__
