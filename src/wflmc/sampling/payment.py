"""Paying for rounds before they are sent: which run it is, whose ledger, and what is
refused."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.planning.plan import Plan, distinct_plans
from wflmc.posterior import Posterior
from wflmc.privacy.ledger import Ledger, refuse_overspending
from wflmc.sampling.starts import Start
from wflmc.support.errors import InputError
from wflmc.support.keys import digest


def refuse_plans(plans: Sequence[Plan]) -> None:
    """Refuse plans that overspend, unless their policy ignores budgets.

    Raises:
        OverspendError: if a plan would take a device beyond its budget.
    """
    for plan in distinct_plans(plans):
        if not (plan.enforced and plan.clips):
            continue
        budget = plan.privacy.budget(plan.devices)
        loss = plan.loss
        # Losses are not negative: no round is beyond the budget unless the last one is.
        if not np.all(plan.ledger + loss.sum(0) <= budget):
            spent = plan.ledger + np.cumsum(loss, axis=0)
            refuse_overspending(budget, spent, plan.start)


def name_run(
    key: jax.Array,
    posterior: Posterior,
    plans: Sequence[Plan],
    numbers: NDArray[np.integer],
    *,
    initial: Start | None,
) -> str:
    """Return a name for all that is sent: two runs share it if they send the same.

    Args:
        key: of the chains.
        posterior: all of it, not its data alone: with another prior the same data make
            other gradients.
        plans: one, or one for each chain.
        numbers: of the chains, [chain].
        initial: where chains start, unless that is drawn.
    """
    leaves, structure = jax.tree.flatten(posterior)
    return digest(
        *(plan.digest.encode() for plan in plans),
        repr(structure).encode(),
        *leaves,
        np.asarray(jax.random.key_data(key)),
        numbers,
        *(() if initial is None else initial.arrays),
    )


def run_name(key: jax.Array, posterior: Posterior, plan: Plan, chains: int) -> str:
    """Return the name under which `sample` charges its ledger for chains from their own
    starts."""
    return name_run(key, posterior, [plan], np.arange(chains), initial=None)


def noise_name(key: jax.Array) -> str:
    """Return the name of a key's noise, which every run with that key shares."""
    return digest(np.asarray(jax.random.key_data(key)))


def open_account(
    ledger: Ledger,
    run: str,
    key: jax.Array,
    posterior: Posterior,
    *,
    plans: Sequence[Plan],
    transmitted: int,
) -> Callable[[slice], None]:
    """Return the function that charges a ledger for a block of a run's rounds.

    Args:
        ledger: that is charged.
        run: the name of the run.
        key: of the noise.
        posterior: whose data the ledger is about.
        plans: the plan; several are refused.
        transmitted: rounds of this run that were transmitted before.

    Raises:
        InputError: if the ledger is about other devices or data, or another unit or
            adjacency, or lacks rounds that were transmitted.
        OverspendError: if the ledger does not leave enough for the plan.
    """
    if not isinstance(ledger, Ledger):
        raise InputError("ledger", type(ledger).__name__, "a wflmc.privacy.Ledger")
    plan = plans[0]
    if len(plans) > 1:
        allowed = "given for one plan: chains are replicas of one experiment"
        raise InputError("ledger", f"{len(plans)} plans", allowed)
    if not plan.clips:
        allowed = "left out for it: no finite loss would be true"
        raise InputError("ledger", "a plan that does not clip", allowed)
    _check_subject(ledger, plan, posterior)
    paid = ledger.rounds(run)
    if paid < transmitted:
        allowed = f"one with all {transmitted} rounds that were sent"
        raise InputError("ledger", f"{paid} rounds of this run", allowed)
    loss = plan.loss
    if paid == 0:
        ledger.check(plan.start, loss)
    noise = noise_name(key)

    def charge(block: slice) -> None:
        ledger.charge(run, plan.start + block.start, loss[block], noise)

    return charge


def _check_subject(ledger: Ledger, plan: Plan, posterior: Posterior) -> None:
    """Refuse a ledger that is about something else than a plan and its data."""
    promise = ledger.privacy
    same_data = ledger.is_about(posterior.digest)
    same_devices = ledger.devices == plan.devices
    same_unit = promise.unit == plan.privacy.unit
    same_adjacency = promise.adjacency == plan.privacy.adjacency
    if same_data and same_devices and same_unit and same_adjacency:
        return
    data = "the same data" if same_data else "other data"
    promised = f"unit = {promise.unit!r}, adjacency = {promise.adjacency!r}"
    subject = f"{ledger.devices} devices, {promised}, {data}"
    devices = f"this plan's {plan.devices} devices"
    allowed = f"about {devices}, its unit, adjacency and data"
    raise InputError("ledger", subject, allowed)
