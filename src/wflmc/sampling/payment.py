"""Paying for rounds before they are sent: which run it is, whose ledger, and what is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.planning.plan import Plan, distinct
from wflmc.posterior import Posterior
from wflmc.privacy.ledger import Ledger, refuse_overspending
from wflmc.sampling.starts import Start
from wflmc.support.errors import InputError
from wflmc.support.keys import digest


def refuse_plans(plans: Sequence[Plan]) -> None:
    """OverspendError for a plan that would take a device beyond its budget, unless its policy ignores budgets."""
    for plan in distinct(plans):
        if plan.enforced and plan.clips:
            budget, loss = plan.privacy.budget(plan.devices), plan.loss
            if not np.all(plan.ledger + loss.sum(0) <= budget):  # else no round before the last is beyond it either
                refuse_overspending(budget, plan.ledger + np.cumsum(loss, axis=0), plan.start)


def name_run(
    key: jax.Array, posterior: Posterior, plans: Sequence[Plan], number: NDArray[Any], initial: Start | None
) -> str:
    """A name for all that is sent: what two runs share exactly if they send the same."""
    start = () if initial is None else initial.arrays
    # All of the posterior, not its data alone: with another prior the same data make other gradients.
    model, kind = jax.tree.flatten(posterior)
    plan_names = (plan.digest.encode() for plan in plans)
    return digest(*plan_names, repr(kind).encode(), *model, np.asarray(jax.random.key_data(key)), number, *start)


def run_name(key: jax.Array, posterior: Posterior, plan: Plan, chains: int) -> str:
    """The name under which `sample` charges its ledger for chains from their own starts."""
    return name_run(key, posterior, [plan], np.arange(chains), None)


def noise_name(key: jax.Array) -> str:
    """The name of a key's noise, which every run with that key shares."""
    return digest(np.asarray(jax.random.key_data(key)))


def open_account(
    ledger: Ledger, run: str, key: jax.Array, posterior: Posterior, plans: Sequence[Plan], sent: int
) -> Callable[[slice], None]:
    """Return the function that charges a ledger for a block of a run's rounds.

    Refused are a ledger of other devices, of another unit or adjacency or about other data, one without the `sent`
    rounds of this run, and a plan that it does not leave room for.
    """
    plan = plans[0]
    if len(plans) > 1:
        raise InputError("ledger", f"{len(plans)} plans", "given for one plan: chains are replicas of one experiment")
    if not plan.clips:
        raise InputError("ledger", "a plan that does not clip", "left out for it: no finite loss would be true")
    promises = [(promise.unit, promise.adjacency) for promise in (ledger.privacy, plan.privacy)]
    about = (ledger.devices, promises[0], ledger.is_about(posterior.digest))
    if about != (plan.devices, promises[1], True):
        which = f"unit = {about[1][0]!r}, adjacency = {about[1][1]!r}, {'the same' if about[2] else 'other'} data"
        allowed = f"about this plan's {plan.devices} devices, its unit, adjacency and data"
        raise InputError("ledger", f"{about[0]} devices, {which}", allowed)
    loss, noise, paid = plan.loss, noise_name(key), ledger.rounds(run)
    if paid < sent:
        raise InputError("ledger", f"{paid} rounds of this run", f"one with all {sent} rounds that were sent")
    if paid == 0:
        ledger.check(plan.start, loss)
    return lambda block: ledger.charge(run, plan.start + block.start, loss[block], noise)
