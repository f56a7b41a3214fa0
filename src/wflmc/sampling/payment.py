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

    The loss of every device is added up over all rounds, on top of what the plan says
    that its ledger has spent before. Plans that do not clip promise no privacy and
    pass.

    Args:
        plans: one, or one for each chain; equal plans are checked once.

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

    A ledger charges the rounds of one name once, so that a run that is repeated, or
    continued from a checkpoint, pays nothing twice.

    Args:
        key: of the chains.
        posterior: all of it, not its data alone: with another prior the same data make
            other gradients.
        plans: one, or one for each chain.
        numbers: of the chains, [chain].
        initial: where chains start, unless that is drawn.

    Returns:
        A digest in hexadecimal digits.
    """
    plan_digests = [plan.digest.encode() for plan in plans]
    leaves, structure = jax.tree.flatten(posterior)
    key_numbers = np.asarray(jax.random.key_data(key))
    start_arrays = () if initial is None else initial.arrays
    return digest(
        *plan_digests,
        repr(structure).encode(),
        *leaves,
        key_numbers,
        numbers,
        *start_arrays,
    )


def run_name(key: jax.Array, posterior: Posterior, plan: Plan, chains: int) -> str:
    """Return the name under which `wflmc.sample` charges its ledger.

    It is a digest of the plan, all of the posterior, the key and the numbers 0, 1, …
    of the chains, whose starts are drawn. It identifies the rounds of such a run in the
    ledger.

    Args:
        key: that `wflmc.sample` is called with.
        posterior: with the devices' data.
        plan: of all chains.
        chains: how many there are.
    """
    return name_run(key, posterior, [plan], np.arange(chains), initial=None)


def noise_name(key: jax.Array) -> str:
    """Return the name of a key's noise, which every run with that key shares.

    A ledger refuses two different runs with the same noise: the difference of what they
    send would have no noise at all. The name does not reveal the key.

    Args:
        key: of the chains, as `wflmc.sample` takes it.
    """
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

    Before the first round is paid for, all rounds of the plan are checked against what
    the ledger has left, so that no run begins that it could not pay to the end.

    Args:
        ledger: that is charged.
        run: the name of the run.
        key: of the noise.
        posterior: whose data the ledger is about.
        plans: the plan, which has to clip; several are refused.
        transmitted: rounds of this run that were transmitted before.

    Returns:
        A function of a block of rounds, to be called before these are transmitted.
        Rounds that were charged before, in this call or in another one, cost nothing.

    Raises:
        InputError: if there are several plans, or one that does not clip; if the ledger
            is about other devices or data, or another unit or adjacency, or lacks
            rounds that were transmitted.
        OverspendError: if the ledger does not leave enough for the plan.
    """
    if not isinstance(ledger, Ledger):
        raise InputError("ledger", type(ledger).__name__, "a wflmc.privacy.Ledger")
    plan = plans[0]
    if len(plans) > 1:
        requirement = "given for one plan: chains are replicas of one experiment"
        raise InputError("ledger", f"{len(plans)} plans", requirement)
    if not plan.clips:
        requirement = "left out for it: no finite loss would be true"
        raise InputError("ledger", "a plan that does not clip", requirement)
    _check_subject(ledger, plan, posterior)
    paid = ledger.rounds(run)
    if paid < transmitted:
        requirement = f"one with all {transmitted} rounds that were sent"
        raise InputError("ledger", f"{paid} rounds of this run", requirement)
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
    requirement = f"about {devices}, its unit, adjacency and data"
    raise InputError("ledger", subject, requirement)
