"""`wflmc plan --capacity`: what the plan costs at its own size or another, as data and as tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from wflmc.errors import InputError

if TYPE_CHECKING:
    from wflmc.channel import Link
    from wflmc.planning import Plan
    from wflmc.planning.costs import Size


class Wanted(NamedTuple):
    """The options of `--capacity`; None: as the scenario or the assumptions have it."""

    devices: float | None = None
    parameters: float | None = None
    rounds: float | None = None
    bandwidth: float | None = None
    power: float | None = None
    efficiency: float | None = None
    coherence: float | None = None


Devices = Annotated[
    float | None, typer.Option("--devices", metavar="K", help="With --capacity: so many devices, such as 1e6.")
]
Parameters = Annotated[
    float | None, typer.Option("--parameters", metavar="M", help="With --capacity: so many parameters.")
]
Rounds = Annotated[
    float | None,
    typer.Option("--rounds", metavar="S", help="With --capacity: so many rounds, of which as large a share is kept."),
]
Bandwidth = Annotated[
    float | None, typer.Option("--bandwidth", metavar="HZ", help="With --capacity: of the channel; 20e6 by default.")
]
Power = Annotated[
    float | None,
    typer.Option("--power", metavar="WATT", help="With --capacity: radiated at the power limit; 0.2 by default."),
]
Efficiency = Annotated[
    float | None,
    typer.Option("--efficiency", metavar="BIT/S/HZ", help="With --capacity: of digital links; 1 by default."),
]
Coherence = Annotated[
    float | None,
    typer.Option("--coherence", metavar="SECONDS", help="With --capacity: how long channels stay; 0.01 by default."),
]


def wanted(asked: bool, given: Wanted) -> Wanted | None:
    """The options, checked; None where no capacity was asked for."""
    for name, value in given._asdict().items():
        if value is None:
            continue
        if not asked:
            raise InputError(f"--{name}", value, "left out without --capacity")
        whole = name in ("devices", "parameters", "rounds")
        if whole and not (1 <= value <= 1e18 and value == int(value)):
            raise InputError(f"--{name}", value, "a whole number between 1 and 1e18")
        if not 1e-18 <= value <= 1e18:
            raise InputError(f"--{name}", value, "a number between 1e-18 and 1e18")
    return given if asked else None


def capacity_document(plan: Plan, link: Link, posterior: Any, asked: Wanted) -> dict[str, Any]:
    """The `capacity` of a plan's JSON: sizes that are not given are the plan's, and its traits serve for all sizes."""
    from wflmc.planning.capacity import capacity, traits_of
    from wflmc.planning.costs import Machine, Radio

    size = _size(plan, posterior, asked)
    given = {name: value for name in Radio._fields if (value := getattr(asked, name)) is not None}
    traits, radio, machine = traits_of(plan, link), Radio(**given), Machine()
    found = capacity(size, traits, radio, machine)
    parts = {name: part._asdict() for name, part in found._asdict().items() if name != "limits"}
    parts["time"]["longest"] = found.time.longest
    return {
        **parts,
        "limits": [{**limit._asdict(), "ratio": limit.ratio, "breaks": limit.ratio > 1} for limit in found.limits],
        "assumed": {
            "radio": radio._asdict(),
            "machine": machine._asdict(),
            "traits": traits._asdict(),
            "planned": {"devices": plan.devices, "parameters": plan.dim, "rounds": plan.rounds},
        },
    }


def _size(plan: Plan, posterior: Any, asked: Wanted) -> Size:
    from wflmc.planning.costs import Size

    rounds = plan.rounds if asked.rounds is None else int(asked.rounds)
    kept = (plan.rounds - plan.burn_in) / plan.rounds
    return Size(
        devices=plan.devices if asked.devices is None else int(asked.devices),
        parameters=plan.dim if asked.parameters is None else int(asked.parameters),
        rounds=rounds,
        samples=max(1, round(kept * rounds)),
        examples=float(posterior.sizes.mean()),
        per_example=4.0 if asked.parameters is None else 6.0,
    )


def capacity_tables(document: dict[str, Any]) -> list[Any]:
    """The costs of a capacity document, and what is nearest to breaking."""
    from rich.table import Table

    costs = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, words in _costs(document):
        costs.add_row(name, words)
    limits = Table(title="What breaks first (needs over has)", title_justify="left")
    for name in ("limit", "needs", "has", "ratio", "what helps"):
        limits.add_column(name, justify="left" if name in ("limit", "what helps") else "right", overflow="fold")
    for limit in document["limits"]:
        row = [
            limit["name"],
            *(_amount(limit[end], limit["unit"]) for end in ("needs", "has")),
            f"{limit['ratio']:.3g}",
        ]
        limits.add_row(*row, limit["remedy"] if limit["breaks"] else "", style="bold red" if limit["breaks"] else None)
    return [costs, limits]


def _costs(document: dict[str, Any]) -> list[tuple[str, str]]:
    size, air, energy, digital = (document[name] for name in ("size", "air", "energy", "digital"))
    files, planning, radio = document["files"], document["planning"], document["assumed"]["radio"]
    taken = document["assumed"]["planned"]
    like = all(size[name] == value for name, value in taken.items())
    source = (
        "" if like else f"; power and senders as in the plan of {taken['devices']} devices × {taken['rounds']} rounds"
    )
    joules = "none: an ideal link"
    if energy["device"] is not None:
        joules = (
            f"{_si(energy['device_round'], 'J')} a device and round, {_si(energy['device'], 'J')} a device in all "
            f"(most: {_si(energy['device_most'], 'J')}), {_si(energy['all_devices'], 'J')} together, at most"
        )
    return [
        (
            "capacity of",
            f"{size['devices']:,} devices, {size['parameters']:,} parameters, {size['rounds']:,} rounds{source}",
        ),
        (
            "channel uses",
            f"{air['channel_uses']:,} a round (real; two a symbol), {air['channel_uses_in_all']:.4g} in all",
        ),
        (
            "on the air",
            f"{_time(air['uplink_seconds'])} up + {_time(air['downlink_seconds'])} down a round, "
            f"{_time(air['seconds_in_all'])} in all at {_si(radio['bandwidth'], 'Hz')}; "
            f"a round up is {air['blocks']:,} × {_time(radio['coherence'])} of coherence",
        ),
        (
            "digital instead",
            f"{_si(digital['uplink_bytes'], 'B')} up a round, {_time(digital['uplink_seconds'])}: "
            f"{digital['times']:.4g} times as long",
        ),
        ("energy", joules),
        ("server", f"{_work(document['server'])}, the ledger's {_time(files['ledger_seconds'])} included"),
        ("device", f"{_work(document['device'])}, with {size['examples']:g} examples"),
        ("emulation", f"{_work(document['emulation'])}, of one chain on one machine"),
        ("end to end", _end_to_end(document["time"], size["rounds"])),
        ("samples", f"{_si(files['samples'], 'B')} for {size['samples']:,} kept rounds"),
        (
            "ledger",
            f"{_si(files['ledger'], 'B')}, and {_si(files['ledger_memory'], 'B')} of memory to read it",
        ),
        ("planning", f"{_time(planning['seconds'])}, {_si(planning['bytes'], 'B')} for {planning['pairs']:.4g} pairs"),
    ]


def _end_to_end(time: dict[str, Any], rounds: int) -> str:
    share = rounds * time[time["longest"]] / time["in_all"]
    return f"{_time(time['in_all'])}: broadcast, gradient, uplink, server in turn; {share:.0%} of it {time['longest']}"


def _work(work: dict[str, float]) -> str:
    return f"{_si(work['operations'], 'FLOP')}, {_si(work['bytes'], 'B')}, {_time(work['seconds'])} a round"


def _amount(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return "no limit"
    if unit == "s":
        return _time(value)
    return _si(value, "B") if unit == "bytes" else f"{value:.3g} {unit}"


def _si(value: float, unit: str) -> str:
    """A number with a prefix of three decimal places."""
    power = 0 if value == 0 else min(8, max(-5, math.floor(math.log10(value) / 3)))
    return f"{value / 1000.0**power:.4g} {'fpnµm kMGTPEZY'[power + 5].strip()}{unit}"


def _time(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    for unit, length in (("years", 365.25 * 86400), ("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.4g} {unit}"
    return _si(seconds, "s")
