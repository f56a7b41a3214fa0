"""A real federation on Flower: the server holds θ, the plan and the ledger, each device its own data."""

from importlib import import_module
from importlib.util import find_spec

_HOMES = {
    "device": ("Device", "client_app"),
    "job": ("make_job",),
    "messages": ("Terms",),
    "server": ("open_server", "run_in_process", "trace_of"),
}
"""Where names are defined; `__init__.pyi` says the same to type checkers."""
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> object:
    """Import what is asked for when it is: modules of this package are commands, too, which Python runs only once."""
    for home, names in _HOMES.items():
        if name in names:
            found = globals()[name] = getattr(
                import_module(f"wflmc.apps.federation.{home}"), name
            )
            return found
    if name.startswith("_") or find_spec(f"wflmc.apps.federation.{name}") is None:
        raise AttributeError(
            f"module 'wflmc.apps.federation' has no attribute {name!r}"
        )
    return import_module(f"wflmc.apps.federation.{name}")


def __dir__() -> list[str]:
    return __all__
