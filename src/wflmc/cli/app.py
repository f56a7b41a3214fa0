"""`wflmc new | plan | run | publish | audit | reproduce | sweep | federate | report | data | doctor`.

The application: its commands, and from whatever happens in one to an exit code and one sentence. Results go to stdout,
also as JSON; warnings and progress to stderr.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Annotated, Any

import click
import typer

from wflmc.cli import (
    FAILED,
    audit,
    data,
    doctor,
    end,
    federate,
    new,
    plan,
    publish,
    report,
    reproduce,
    run,
    sweep,
)
from wflmc.errors import InputError, OverspendError, SamplingError, UnfinishedError
from wflmc.version import __version__

DONE, BAD_INPUT = 0, 2
INTERRUPTED = 130
"""What typer returns when a command is interrupted."""

app = typer.Typer(
    name="wflmc",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Bayesian federated learning over the air: plan it, sample with it, prove its privacy.",
)

for _module in (new, plan, run, publish, audit, reproduce, sweep, federate, report, data, doctor):
    app.command(_module.__name__.rpartition(".")[2])(_module.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"wflmc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_app() -> object:
    """Run the command that the arguments name; its exit code."""
    found = typer.main.get_command(app)
    assert isinstance(found, click.Group)
    for parameter in (each for one in found.commands.values() for each in one.params):
        if isinstance(parameter, click.Option):  # else typer's messages name a variable that there is not
            parameter.show_envvar = parameter.envvar is not None
    return found.main(standalone_mode=False)


def guarded(command: Callable[[], object]) -> int:
    """Run a command; its exit code. Faults of our own still end in a traceback, which is what a bug report needs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # a captured stream may not know its encoding
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        with _heard(), _plain_warnings():
            code = command()
        sys.stdout.flush()
    except InputError as error:
        return _say(str(error), BAD_INPUT)
    except click.UsageError as error:
        return _say(f"{error.format_message()} Try --help.", BAD_INPUT)
    except (SamplingError, OverspendError, UnfinishedError) as error:
        return _say(str(error), FAILED)
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    except MemoryError:
        return _say("This needs more memory than there is: use fewer rounds, devices, parameters or chains.", FAILED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
        return FAILED
    except OSError as error:
        return _say(f"{error.strerror or error}: {error.filename or 'output'}.", FAILED)
    if code == INTERRUPTED:
        return _say("Interrupted; files and points that were finished are kept.", INTERRUPTED)
    return code if isinstance(code, int) else DONE


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Say what is wrong with a ledger in a sentence, without the line of code that noticed."""
    usual: Any = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if category.__name__ == "LedgerWarning":
            _say(str(message), DONE)
        else:
            usual(message, category, *where)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = usual


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """Let Ctrl-C through wherever it comes, unless it is ignored; only the main thread hears it."""
    usual = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, end)
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C; where Python would swallow it, in JAX's hook of the garbage collector, once more a moment later.

    While a command imports what it needs, nothing can be lost, and modules that are interrupted print tracebacks of
    their own: the process ends at once.
    """
    at, inner = frame, ""
    while at is not None:
        if at.f_code.co_name == "_xla_gc_callback":
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            return
        if inner.startswith("<frozen importlib") and at.f_globals.get("__name__", "").startswith("wflmc.cli"):
            end(number, frame)
        inner, at = at.f_code.co_filename, at.f_back
    raise KeyboardInterrupt


def leave(code: int) -> None:
    """End the process; after an interrupt at once, because tearing down under running threads of JAX may crash."""
    if code == INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)
    sys.exit(code)


def _say(sentence: str, code: int) -> int:
    print(f"wflmc: {sentence}", file=sys.stderr)
    return code
