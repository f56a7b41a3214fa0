"""The loop over rounds: one for simulation, federations, protected fits and coverage.

What differs between them are four parameters:

- the *transport* brings to the server what devices transmit: a local superposition, as
  part of the compiled round, or an exchange of messages with who has answered;
- the *charge* pays for it (`run_rounds` says why this is before anything is revealed);
- the *advance* draws the noise (`wflmc.sampling.noise`) and updates the chains by a
  kernel: a compiled block of rounds (`wflmc.sampling.simulation`), or one round on the
  host (`HostRound`);
- *keep* stores and reports what has to stay.

Their order is the same everywhere, and it is what privacy rests on: the advance draws
no noise for a signal that is not paid for, nothing is kept that is not finite, and no
block begins before the one before it is kept.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.support.errors import SamplingError

StateT = TypeVar("StateT")
SignalT = TypeVar("SignalT")


class HasFinite(Protocol):
    """What an advance reports of a block."""

    @property
    def finite(self) -> ArrayLike:
        """Return whether all chains were finite after each round, [round, ...].

        Axes after the first are reduced by `check_finite`; a compiled block may report
        one value per accelerator. Rounds that only fill up the last block may follow,
        and are ignored.
        """


class HasPosition(Protocol):
    """The state of chains that a host can look at."""

    @property
    def position(self) -> ArrayLike:
        """Return θ[chain, m], an array of NumPy or JAX.

        `HostRound` looks at it after every update, to see whether all chains are still
        finite; with kinetic dynamics an infinite velocity shows here a round later.
        """


InfoT = TypeVar("InfoT", bound=HasFinite)
HostStateT = TypeVar("HostStateT", bound=HasPosition)


def run_rounds(
    state: StateT,
    blocks: Iterable[slice],
    *,
    transport: Callable[[slice, StateT], SignalT],
    charge: Callable[[slice, SignalT], None],
    advance: Callable[[slice, StateT, SignalT], tuple[StateT, InfoT]],
    keep: Callable[[slice, StateT, InfoT], None],
) -> StateT:
    """Run blocks of rounds one after the other: transport, charge, advance, keep.

    The transport is called before the charge, and yet nothing is sent unpaid:

    - In simulations it does nothing (`superpose_locally`). The signal is computed and
      its noise is drawn in the advance, after the charge.
    - A protected fit computes the sum in it, which nobody sees before the advance adds
      noise, and has paid for all rounds before the loop
      (`wflmc.apps.tables.protected.protected_chain`).
    - In a federation it exchanges messages. Each device pays from its own ledger before
      its signal leaves it (`wflmc.apps.federation.device.Device.answer`). The charge
      here is that of the server's ledger, which needs to know who has sent; it comes
      before any noise that the server draws, and before anything of the round is
      stored.

    Args:
        state: of all chains before the first block.
        blocks: successive rounds, each as a slice of the plan's.
        transport: from a block and the state to what reaches the server, without the
            noise that the server or the channel adds.
        charge: pays for a block, by what has reached the server; raises where a budget
            does not suffice, before the advance.
        advance: from a block, the state and the signal to the state after the block,
            and what is reported of it.
        keep: stores what has to stay of a block, and reports progress.

    Returns:
        The state after the last block.

    Raises:
        SamplingError: if a chain is no longer finite; that block is charged but not
            kept.
    """
    for block in blocks:
        signal = transport(block, state)
        charge(block, signal)
        state, info = advance(block, state, signal)
        check_finite(info.finite, block)
        keep(block, state, info)
    return state


def superpose_locally(block: slice, state: object) -> None:
    """Exchange nothing: gradients are added up within the compiled round.

    This is the transport of simulations, in which devices and server are one program.
    It returns None as the signal, which `Simulation` expects.

    Args:
        block: the rounds that are about to run.
        state: of the chains before them.
    """


def charge_nothing(block: slice, signal: object) -> None:
    """Pay nothing: there is no ledger, or all rounds were paid for before the first.

    Protected fits charge their ledger once, for every round of the plan, before the
    loop begins. Federations and `wflmc.sample` with a ledger charge block by block
    instead.

    Args:
        block: the rounds that are about to run.
        signal: what the transport has brought.
    """


def check_finite(finite: ArrayLike, block: slice) -> None:
    """Refuse a block in which a parameter became infinite or nan.

    A chain cannot recover from that, and nothing of such a block may be stored.

    Args:
        finite: of every round of the block, [round, ...]; rounds beyond the block's
            end do not count.
        block: the rounds.

    Raises:
        SamplingError: names the first such round, counted from 1.
    """
    rounds = block.stop - block.start
    by_round = np.asarray(finite)[:rounds].reshape(rounds, -1).all(1)
    if by_round.all():
        return
    first_diverged = block.start + int(np.argmin(by_round)) + 1
    raise SamplingError(
        f"A chain became infinite or not a number in round {first_diverged}. Either "
        "the noise or the step is too large (a smaller step size, a larger clip, or a "
        "policy with less noise in early rounds help), or a custom model has no finite "
        "gradient at the chain's position."
    )


class HostInfo(NamedTuple, Generic[SignalT]):
    """What is reported of a round that was run on the host."""

    signal: SignalT
    """What the transport has brought."""
    received: Any
    """y[chain, m], noise included; None where nothing was received."""
    finite: NDArray[np.bool_]
    """Whether all chains are finite, [1]."""


@dataclass(frozen=True, eq=False)
class HostRound(Generic[HostStateT, SignalT]):
    """An advance by one round on the host: the noise source, then the update.

    The signal has crossed a transport that no compiled loop reaches into. A round in
    which nothing was received leaves the chains where they are.
    """

    receive: Callable[[int, SignalT], Any]
    """The noise source: from the round's index and the signal to y[chain, m]; None
    where no device has transmitted."""
    update: Callable[[int, HostStateT, SignalT, Any], HostStateT]
    """The kernel's update: from the round's index, the state, the signal and y to the
    next state."""

    def __call__(
        self,
        block: slice,
        state: HostStateT,
        signal: SignalT,
    ) -> tuple[HostStateT, HostInfo[SignalT]]:
        """Run one round.

        Args:
            block: a single round.
            state: before the round.
            signal: what the transport has brought of the round.

        Returns:
            The state after the round, and whether it is finite. Where `receive` returns
            None, the state is the one before the round.
        """
        received = self.receive(block.start, signal)
        if received is not None:
            state = self.update(block.start, state, signal, received)
        finite = np.isfinite(np.asarray(state.position)).all()
        return state, HostInfo(signal, received, finite[None])


def single_rounds(first: int, rounds: int) -> Iterable[slice]:
    """Return blocks of one round each.

    Rounds on the host run one by one, since a message has to reach the devices between
    any two of them.

    Args:
        first: index of the first round, above 0 where a run continues.
        rounds: S, the number of rounds of the plan.

    Returns:
        Slices of length 1; none where `first` is S.
    """
    return (slice(index, index + 1) for index in range(first, rounds))
