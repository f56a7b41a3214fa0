"""The plan: all that the sampler needs, and what is known about it beforehand.

A `Plan` has three parts: `Rounds`, what acts in every round; `Certificate`, what is
known about it before anything is transmitted; and `Context`, what it was made for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, Self

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import OVERDAMPED, Array, Dynamics, Motion, from_constants
from wflmc.planning.solvers.closed_form import LIMITS, POLICY
from wflmc.privacy import Privacy, round_loss
from wflmc.support import storage
from wflmc.support.errors import InputError, Shown
from wflmc.support.keys import digest
from wflmc.support.notices import Notice, codes, texts

PLAN_FILE = "plan.npz"
"""The usual name of a file that `Plan.save` writes."""
RoundValues = Any
"""Arrays of NumPy in a plan, of JAX in the sampler, which has None for zeros."""
RoundIndex = int | slice | NDArray[np.intp] | jax.Array
"""One round, or several."""
PLAN_FILE_CONTENT = "a plan as wflmc wrote it"
"""What a file of a plan must contain, as the end of an error's sentence."""


@dataclass(frozen=True, eq=False)
class Rounds:
    """What acts in every round, as arrays with a leading round axis.

    It is a pytree, which can be sliced, stacked and scanned over. In a plan its arrays
    are NumPy's, in float64; in the sampler they are JAX's.
    """

    step_size: RoundValues
    """η[S], or h of kinetic dynamics."""
    gain: RoundValues
    """α[S]."""
    weight: RoundValues
    """Weight of each device's gradient in the update, [S, K].

    It is K/K_a, or 0 for a silent device.
    """
    server_noise: RoundValues
    """β[S], variance of the noise that the server adds.

    It is added to θ, or to the velocity of kinetic dynamics.
    """
    received: RoundValues | None = None
    """|h/ĥ|[S, K], the amplitude of a device at the server over the intended one.

    None where both are equal.
    """

    def __len__(self) -> int:
        """Return S."""
        return int(self.gain.shape[0])

    def __getitem__(self, index: RoundIndex) -> "Rounds":
        """Return one of the rounds, or a slice of them."""
        selected: Rounds = jax.tree.map(lambda values: values[index], self)
        return selected


jax.tree_util.register_dataclass(Rounds, [field.name for field in fields(Rounds)], [])


@dataclass(frozen=True, eq=False, kw_only=True)
class Certificate:
    """What is known of a plan before anything is transmitted."""

    threshold: Array
    """The smallest |h| with which a device transmits, [S].

    It is 0 where all devices do, and nan where there is no threshold.
    """
    bound: Array | None
    """B[1..S]; None where no bound is known, as for kinetic dynamics."""
    power_share: Array
    """Fraction of its transmit power limit that the weakest active device uses, [S].

    It is 0 on an ideal link.
    """
    limit: NDArray[np.intp]
    """The limit of every round, [S], as an index into LIMITS."""
    objective: float
    """The worst or the average of the bound after burn-in; nan where there is none.

    With the objective "exact" it is the worst W2² of the chain's law, and with
    "transcript" V, the variance of the noise in what the kept rounds together say about
    the gradient.
    """
    objective_name: str
    """worst, average, exact or transcript."""
    lower_bound: float | None
    """What no plan within the same limits can be below; None if nothing is proven."""
    regime: str | None
    """lmc-limited, power-limited, dp-limited or policy-limited.

    A plan is policy-limited where its policy reaches none of the other limits. None
    where the limit changes with the round.
    """
    gamma: float
    """The largest factor by which a kept round forgets the start.

    It is that of Proposition 1, or of the mean with kinetic dynamics.
    """
    noise_limit: float = np.inf
    """The limit on a round's noise, relative to what all clipped gradients can undo."""
    notices: tuple[Notice, ...] = ()
    """What the numbers of the plan do not cover."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Context:
    """What the plan was made for, the same in all rounds."""

    privacy: Privacy
    """The promise that the plan was made for."""
    clip: Array
    """ℓ[K]; infinite for a scheme that does not clip."""
    example_clip: Array
    """Bound on one example's gradient, [K]; infinite where examples are not clipped."""
    noise_power: float
    """N0."""
    burn_in: int
    """S_b, rounds that are discarded."""
    init: str
    """Where chains start: prior or zero."""
    mu: float
    """Strong convexity of the cost."""
    L: float
    """Smoothness of the cost."""
    dim: int
    """m, the number of parameters."""
    sizes: NDArray[np.intp]
    """N_k, the number of examples of every device, [K]."""
    initial_w2_sq: float
    """W2² between start and posterior."""
    ledger: Array
    """Privacy loss that each device had spent before this plan, [K]."""
    start: int = 0
    """The number of this plan's first round, where rounds came before it."""
    uncertainty: float = 1.0
    """The largest |h/ĥ| that the devices' knowledge of their channels leaves open."""
    enforced: bool = True
    """Whether the policy keeps to the budgets; the sampler then refuses all else."""
    dynamics: Dynamics = OVERDAMPED
    """Overdamped or kinetic."""
    downlink_noise: float = 0.0
    """Variance of the noise in every coordinate that a device receives of θ."""
    rounding: float = 0.0
    """e: clipping acts at ℓ/(1 + e) and c/(1 + e).

    Float32 sums are then no more sensitive than is paid for.
    """


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown):
    """Gains and active devices of every round, and what they imply.

    `wflmc.plan` makes plans, and `wflmc.sample` runs them. The fields that are needed
    most often are properties: `plan.gain` is `plan.rounds.gain`.
    """

    rounds: Rounds
    """What acts in every round."""
    certificate: Certificate
    """What is known of the plan before anything is transmitted."""
    context: Context
    """What the plan was made for."""

    def _facts(self) -> dict[str, Any]:
        objective = None if np.isnan(self.objective) else self.objective
        facts: dict[str, Any] = {
            "devices": self.devices,
            "parameters": self.dim,
            "rounds": len(self.rounds),
            "burn-in rounds": self.burn_in,
            "dynamics": self.dynamics.constants.get("dynamics"),
            "step_size": self.step_size,
            "gain": self.gain,
            "gap": self.gap,
            "regime": self.regime,
            "objective": objective,
        }
        promise = self.privacy
        if promise.epsilon is not None:
            facts["epsilon"] = promise.epsilon
            facts["delta"] = promise.delta
            facts["adjacency"] = promise.adjacency
        return facts

    # The rounds.

    @property
    def step_size(self) -> Array:
        """Return the step size of every round, η[S], or h[S] of kinetic dynamics.

        All of them are equal unless the request had one for each round or
        `step_schedule` was "planned", which changes the steps of burn-in. The update
        is θ ← θ − η K/(α K_a) y + √β q (Sec. III-A).
        """
        return self.rounds.step_size

    @property
    def gain(self) -> Array:
        """Return the gain α[S] at which gradients arrive.

        Device k transmits x_k = (α/h_k) clip(g_k), so that the server receives
        y = α Σ_k clip(g_k) + z over the active devices. It is planned as
        α = √(a N0), where a is the unknown of the power problem. A round costs an
        active device the privacy loss 2(α s_k)²/N0, s_k being half the change that
        its adjacency allows.
        """
        return self.rounds.gain

    @property
    def weight(self) -> Array:
        """Return the weight of each device's gradient in the update, [S, K].

        It is K/K_a for an active device and 0 for a silent one, so that active
        gradients stand for all. Where devices do not know their channels exactly it is
        the weight that was intended; `weight_received` has what arrives.
        """
        return self.rounds.weight

    @property
    def server_noise(self) -> Array:
        """Return β[S], the variance of the noise that the server adds.

        It fills up what channel noise lacks of the noise that sampling needs,
        β = max(0, 2η − η² N0 (K/(α K_a))²) (Sec. III-A). It is added to θ, or to the
        velocity of kinetic dynamics. It is 0 in plans that optimize the exact law,
        because those choose all the noise of a round.
        """
        return self.rounds.server_noise

    @property
    def received(self) -> Array | None:
        """Return |h/ĥ|[S, K], what arrives of a device over what was intended.

        A device that takes its channel for ĥ inverts ĥ, not h. It is None where
        devices know their channels exactly (`csi_error` is 0) and on an ideal link;
        everything is then as if it were 1.
        """
        return self.rounds.received

    @property
    def devices(self) -> int:
        """Return K, the number of devices, silent ones included."""
        return int(self.weight.shape[-1])

    @property
    def active_devices(self) -> NDArray[np.intp]:
        """Return K_a[S], the number of devices that transmit in every round."""
        return np.count_nonzero(self.weight, axis=-1)

    @property
    def weight_received(self) -> Array:
        """Return the weight with which each gradient really enters the update, [S, K].

        It is `weight` times |h/ĥ|, and equals `weight` where devices know their
        channels exactly. The law of a chain, and the bias of its updates, follow from
        these weights; devices themselves only know the intended ones.
        """
        if self.received is None:
            return self.weight
        return self.weight * self.received

    @property
    def scale(self) -> Array:
        """Return K/K_a, [S], the server's factor on the received sum.

        The server multiplies y/α by it, so that the sum over the active devices stands
        for that over all. It is computed as the largest weight of each round, which
        is that of every active device.
        """
        return self.weight.max(-1)

    # The certificate.

    @property
    def threshold(self) -> Array:
        """Return g[S], the smallest |h| with which a device transmits (Sec. V-D).

        It is 0 in rounds in which all devices transmit by rule, and nan under the
        schedule "unbiased", which ranks devices by their own fading laws and has no
        common threshold. It depends on the channels alone, not on the data.
        """
        return self.certificate.threshold

    @property
    def bound(self) -> Array | None:
        """Return B[1..S], the bound on W2² between the chain and the posterior.

        It is Proposition 1: B[s] = ρ² B[s−1] + κ (discretization + silent devices +
        excess noise), from B[0] = `initial_w2_sq`, and holds while no gradient is
        clipped. It is None where no bound is known: with kinetic dynamics, and with
        steps above 2/L where L is known to be loose.
        """
        return self.certificate.bound

    @property
    def power_share(self) -> Array:
        """Return the fraction of its power limit that the weakest sender uses, [S].

        The weakest sender is the active device that affords the smallest gain, by its
        channel, its power limit and its clip. At 1 the round is at its power limit. It
        is 0 on an ideal link, where power has no limit.
        """
        return self.certificate.power_share

    @property
    def limit(self) -> NDArray[np.intp]:
        """Return what limits the power of every round, [S], as an index into LIMITS.

        The limits are the noise that Langevin sampling needs, transmit power and
        privacy, in this order where several hold; and policy-limited where a policy
        transmits with less power than all of these allow.
        """
        return self.certificate.limit

    @property
    def objective(self) -> float:
        """Return the value of what the policy's objective minimizes.

        By `Policy.objective` it is the worst or the average of the bound after
        burn-in, the worst exact W2² (by the weights intended, without `received`), or
        V of transcripts, the variance of the noise in what all kept rounds say about
        the gradient. It is nan where the objective is a bound that is not known.
        Policies that do not optimize report it as well.
        """
        return self.certificate.objective

    @property
    def lower_bound(self) -> float | None:
        """Return what no plan within the same limits can be below.

        It is proven by weak duality and does not rely on the solver: any weights of
        rounds and prices of budgets give such a bound, and the best that the solver
        met is kept. It is None where nothing is proven, as for policies that do not
        optimize, for `csi` "causal" and for the solver cvxpy.
        """
        return self.certificate.lower_bound

    @property
    def regime(self) -> str | None:
        """Return what limits the whole plan, in Theorem 1's words.

        It is one of lmc-limited, power-limited, dp-limited and policy-limited. It is
        None where channels or limits change with the round (`regime_share` counts
        those), and for the objectives "exact" and "transcript", for which the theorem
        says nothing.
        """
        return self.certificate.regime

    @property
    def gamma(self) -> float:
        """Return γ, the largest factor by which a kept round forgets the start.

        For overdamped steps it is Proposition 1's: 1 − ημ for η ≤ 2/(μ + L), else
        ηL − 1. With kinetic dynamics it is the factor by which the mean of a chain
        forgets its start in the long run. It is below 1.
        """
        return self.certificate.gamma

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Return what the numbers of the plan do not cover, with codes.

        Code that decides something by them compares `Notice.code`, never the text.
        Most are warnings: of excess noise, of budgets that a policy ignores, or of
        inputs that look wrong. It is empty where there is nothing to say.
        """
        return self.certificate.notices

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the texts of `notices`, one sentence or two each, without codes."""
        return texts(self.certificate.notices)

    @property
    def gap(self) -> float | None:
        """Return (objective − lower_bound)/objective, the proven distance to optimal.

        A gap of 0.01 means that no plan within the same limits has an objective more
        than 1 % below this one. It is 0 where rounding puts the bound past the
        objective, and None where there is no lower bound.
        """
        if self.lower_bound is None:
            return None
        if self.objective <= self.lower_bound:
            return 0.0
        return 1 - self.lower_bound / self.objective

    @property
    def regime_share(self) -> dict[str, float]:
        """Return the fraction of the rounds at each limit, by the limit's name.

        Rounds of burn-in count as well. The fractions add up to 1. lmc-limited,
        power-limited and dp-limited are always there; policy-limited only where some
        round is.
        """
        shares = {
            name: float(np.mean(self.limit == index))
            for index, name in enumerate(LIMITS)
        }
        if shares[POLICY] == 0:
            del shares[POLICY]
        return shares

    # The context.

    @property
    def privacy(self) -> Privacy:
        """Return the promise that the plan was made for; without ε it promises none."""
        return self.context.privacy

    @property
    def clip(self) -> Array:
        """Return ℓ[K], the largest norm of a device's gradient that is transmitted.

        Longer gradients are scaled down to it, g · min(1, ℓ/‖g‖), in fact to slightly
        less (`clips_at`). It is infinite for schemes that do not clip.
        """
        return self.context.clip

    @property
    def example_clip(self) -> Array:
        """Return c[K], the largest norm of one example's gradient.

        Gradients of examples are clipped to it before they are added up, which is
        what hides single records. It is infinite where examples are not clipped.
        """
        return self.context.example_clip

    @property
    def noise_power(self) -> float:
        """Return N0, the variance of the receiver's noise in every coordinate."""
        return self.context.noise_power

    @property
    def burn_in(self) -> int:
        """Return S_b, the number of rounds at the beginning that are discarded."""
        return self.context.burn_in

    @property
    def init(self) -> str:
        """Return where chains start: "prior", drawn from it, "prior-mean" or "zero"."""
        return self.context.init

    @property
    def mu(self) -> float:
        """Return μ, the strong convexity of the cost: its smallest curvature."""
        return self.context.mu

    @property
    def L(self) -> float:
        """Return L, the smoothness of the cost, as the plan takes it.

        It is the posterior's upper bound on the curvature, except where that is known
        to be loose and the longest step reaches 2/L: then it is 1/η of that step, or
        2/h² with kinetic dynamics, and `bound` is None. Steps are then stable below
        twice this curvature.
        """
        return self.context.L

    @property
    def dim(self) -> int:
        """Return m, the number of parameters, which is the channel uses of a round."""
        return self.context.dim

    @property
    def initial_w2_sq(self) -> float:
        """Return W2² between start and posterior, B[0] of the bound.

        It is the public value of the request, or computed from the posterior for chains
        that start at `init`. It is nan where steps are longer than a loose L allows,
        and the bound of the round before in a plan by `from_round`.
        """
        return self.context.initial_w2_sq

    @property
    def ledger(self) -> Array:
        """Return the privacy loss that each device had spent before this plan, [K].

        The plan spends no more than this leaves of the budgets, and `epsilon_spent`
        includes it. It is 0 for first runs. `spent` has what the plan itself adds.
        """
        return self.context.ledger

    @property
    def start(self) -> int:
        """Return the number of this plan's first round.

        It is 0 unless rounds came before it. Channels, noise and the numbering of
        files continue from there.
        """
        return self.context.start

    @property
    def enforced(self) -> bool:
        """Return whether the policy keeps to the privacy budgets.

        Where it does, the sampler refuses a plan that spends more than is left of
        them. Benchmarks such as "no-dp" ignore budgets on purpose; a notice then says
        how many devices overspend.
        """
        return self.context.enforced

    @property
    def dynamics(self) -> Dynamics:
        """Return how a round moves a chain: overdamped as in the paper, or kinetic."""
        return self.context.dynamics

    @property
    def downlink_noise(self) -> float:
        """Return the variance of the noise in every coordinate of a received θ.

        Every device receives the broadcast with noise of its own. It is 0 where the
        downlink is ideal, as in the paper.
        """
        return self.context.downlink_noise

    @property
    def rounding(self) -> float:
        """Return e, by which clipping acts below ℓ and c (`clips_at`).

        It bounds what rounding in float32 may add to the change that one record or one
        device makes, relative to that change. It is 0 for schemes that do not clip.
        """
        return self.context.rounding

    # Noise.

    @property
    def kick(self) -> Array:
        """Return the factor of the gradient in the update, [S].

        For overdamped steps it is η. For kinetic ones it is the factor on the
        velocity, (h/2)(1 + e) with e = exp(−γ_f h). Noise of variance v in the
        received gradient puts kick² v on the update.
        """
        return np.asarray(self.dynamics.kick(self.step_size))

    @property
    def langevin_noise(self) -> Array:
        """Return the variance of the noise that samples of the posterior need, [S].

        For overdamped steps it is 2η (Lemma 3), in every coordinate of θ. For kinetic
        ones it is 1 − e² in every coordinate of the velocity, with e = exp(−γ_f h).
        """
        return np.asarray(self.dynamics.langevin_noise(self.step_size))

    @property
    def noise_variance(self) -> Array:
        """Return σ²[S], the variance of the noise in every coordinate of the update.

        Channel noise and server noise together, σ² = N0 (η K/(α K_a))² + β. With
        kinetic dynamics it is that of the velocity, with `kick` in the place of η.
        Noise in the downlink is not part of it.
        """
        channel_noise = self.noise_power * (self.kick * self.scale / self.gain) ** 2
        return channel_noise + self.server_noise

    @property
    def noise_ratio(self) -> float:
        """Return the mean noise of the kept rounds over what sampling needs.

        At 1 samples spread as the posterior does, up to the error of finite steps.
        At r above 1 they spread too widely, by about √r where noise decides. No
        diagnostic of the chains can see it.
        """
        ratio = self.noise_variance / self.langevin_noise
        return float(np.mean(ratio[self.burn_in :]))

    @property
    def excess_noise(self) -> Array:
        """Return η²β̃[S], the variance of the noise beyond what sampling needs.

        It is max(0, σ² − 2η), or beyond 1 − e² for kinetic dynamics. The server cannot
        remove it: it is there where power or privacy forces a small gain.
        """
        return np.maximum(self.noise_variance - self.langevin_noise, 0.0)

    @property
    def motion(self) -> Motion:
        """Return how chains move by this plan, but for the noise of channel and server.

        It is what posteriors need to compute the law of a chain: steps, the weights
        with which gradients really arrive, the start, the dynamics and the noise of
        the downlink.
        """
        return Motion(
            step_size=self.step_size,
            weight=self.weight_received,
            init=self.init,
            dynamics=self.dynamics,
            downlink=self.downlink_noise,
        )

    # Privacy.

    @property
    def clips_at(self) -> tuple[Array, Array]:
        """Return where clipping acts, ℓ/(1 + e) and c/(1 + e), each [K].

        Float32 sums of gradients that are clipped there are no more sensitive than
        exact sums of gradients clipped at ℓ and c, which is what the plan pays for.
        Both are infinite where nothing is clipped.
        """
        factor = 1 + self.rounding
        return self.clip / factor, self.example_clip / factor

    @property
    def clips(self) -> bool:
        """Return whether every device's gradient is clipped, as a whole or by example.

        Without that one record may change a transmission without limit, and no finite
        ε would be true: `loss` is infinite and `epsilon_spent` None. Of the schemes
        that come with wflmc only "noiseless" does not clip.
        """
        smaller_clip = np.minimum(self.clip, self.example_clip)
        return bool(np.all(np.isfinite(smaller_clip)))

    @property
    def loss(self) -> Array:
        """Return the privacy loss of every round and device, [S, K].

        It is 2(α s_k)²/N0 for an active device and 0 for a silent one (Proposition 2), where
        s_k is half the change that the promise's adjacency allows. Rounds add up. It
        is infinite where a device sends unclipped. Where devices do not know their
        channels exactly, it is the largest that the stated error leaves open, or that
        of what really arrived where this is more.
        """
        half_change = self.privacy.half_change(self.clip, self.example_clip)
        strength: float | Array = self.context.uncertainty
        if self.received is not None:
            strength = np.maximum(strength, self.received)
        amplitude = strength * self.weight / self.scale[:, None]
        return round_loss(self.gain, amplitude, half_change, self.noise_power)

    @property
    def spent(self) -> Array:
        """Return the privacy loss of every device over all rounds, [K].

        It is Σ_s of `loss`, without what `ledger` says was spent before. A plan that
        is `enforced` keeps spent + ledger within the budgets of the promise.
        """
        return self.loss.sum(-2)

    @property
    def epsilon_spent(self) -> float | None:
        """Return ε of the worst device at its δ, earlier spending included.

        The losses of the ledger and of all rounds are added up and converted by the
        promise's accountant. It is None where gradients are not clipped and where the
        promise has no δ.
        """
        if not self.clips:
            return None
        return self.privacy.epsilon_spent(self.spent + self.ledger)

    # Other plans made from this one.

    def with_rounds(self, **arrays: Array | None) -> "Plan":
        """Return the plan with other arrays of its rounds.

        It serves variants that nobody planned: an audit's slower steps, or the noise
        that a federation's absent devices leave. The certificate stays that of the
        original plan: bound, objective and regime are not computed again. Noise, loss
        and ε are properties, and follow the new arrays.

        Args:
            **arrays: fields of `Rounds`, such as gain[S] or weight[S, K].

        Returns:
            The changed plan.
        """
        changes: dict[str, Any] = dict(arrays)
        return replace(self, rounds=replace(self.rounds, **changes))

    def with_notices(self, notices: Iterable[Notice]) -> "Plan":
        """Return the plan with other notices in the place of its own.

        Args:
            notices: all that the new plan has; to add one, pass those of the plan as
                well.

        Returns:
            The plan, equal in all other fields.
        """
        certificate = replace(self.certificate, notices=tuple(notices))
        return replace(self, certificate=certificate)

    def from_round(self, start: int) -> "Plan":
        """Return the plan from its round `start` on.

        Args:
            start: the first of its rounds, from 0.

        Returns:
            A plan whose ledger has what the rounds before have spent, and whose
            `initial_w2_sq` is the bound of the round before; nan where there is none.
            Objective and regime stay those of the whole plan.

        Raises:
            InputError: the plan has no such round.
        """
        count = len(self.rounds)
        if not 0 <= start < count:
            raise InputError("start", start, f"between 0 and {count - 1}")
        certificate = self._certificate_from(start)
        context = self._context_from(start)
        return Plan(self.rounds[start:], certificate, context)

    def _certificate_from(self, start: int) -> Certificate:
        """Return the certificate with the rounds from `start` on."""
        return replace(
            self.certificate,
            threshold=self.threshold[start:],
            bound=None if self.bound is None else self.bound[start:],
            power_share=self.power_share[start:],
            limit=self.limit[start:],
        )

    def _context_from(self, start: int) -> Context:
        """Return the context of the rounds from `start` on."""
        spent_before = self.loss[:start].sum(0) if self.clips else 0.0
        return replace(
            self.context,
            ledger=self.ledger + spent_before,
            initial_w2_sq=self._distance_before(start),
            start=self.start + start,
            burn_in=max(0, self.burn_in - start),
        )

    def _distance_before(self, round_index: int) -> float:
        """Return the bound on W2² before a round; nan where none is known."""
        if round_index == 0:
            return self.initial_w2_sq
        if self.bound is None:
            return np.nan
        return float(self.bound[round_index - 1])

    # Names and files.

    @property
    def digest(self) -> str:
        """Return a short name for all that the plan makes devices and server do.

        It changes with the rounds, burn-in, the clips and their `rounding`, N0, the
        noise of the downlink, the dynamics, `init` and `start`, and not with the
        certificate or the promise: plans of equal digest make equal chains of the same
        posterior and key.
        """
        numbers = [self.noise_power, self.start, self.burn_in]
        numbers.extend(jax.tree.leaves(self.dynamics))
        # Left out where they are 0.
        for value in (self.downlink_noise, self.rounding):
            if value:
                numbers.append(value)
        facts = [
            *jax.tree.leaves(self.rounds),
            self.clip,
            self.example_clip,
            np.array(numbers),
            self.init.encode(),
        ]
        # Else a friction, which `numbers` has without its name, could be taken for the
        # variance of downlink noise.
        if self.dynamics.has_velocity:
            facts.append(self.dynamics.name.encode())
        return digest(*facts)

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of every field, certificate and context included.

        It is computed from the arrays that `save` writes, so that a plan and what
        `load` reads of it have the same one. Use `digest` to compare what plans do.
        """
        return storage.arrays_digest(_plan_arrays(self))

    def save(self, path: str | Path, *, mode: int = 0o666) -> Path:
        """Write all fields to an .npz file, from which `load` reads the same plan.

        The file has an array for every field, by names such as `rounds.gain` and
        `context.privacy.epsilon`, and a digest of them. Fields that are None are left
        out.

        Args:
            path: of the file, which is written whole or not at all.
            mode: who may read a new file, before the umask.

        Returns:
            The path.
        """
        target = Path(path)
        with storage.replacing(target, mode=mode) as file:
            self.write(file)
        return target

    def write(self, file: IO[bytes]) -> None:
        """Write what `save` writes to a file that is open for writing.

        It serves callers that write several files together, and replace all of them or
        none. The file is left open.

        Args:
            file: open in binary mode.
        """
        storage.write_arrays(file, _plan_arrays(self))

    @classmethod
    def load(cls, path: str | Path, *, key: str = "plan") -> Self:
        """Read the plan that `save` has written.

        Args:
            path: of the file.
            key: the option that names the file, for errors.

        Returns:
            The plan, equal in every field. Lists of numbers in its promise are arrays.

        Raises:
            InputError: the file cannot be read, is damaged or has been changed.
        """
        arrays = storage.read_verified_arrays(
            path, key=key, requirement=PLAN_FILE_CONTENT
        )
        try:
            return cls(
                rounds=Rounds(**_fields_of_part(arrays, "rounds")),
                certificate=_certificate_in(arrays),
                context=_context_in(arrays),
            )
        except (TypeError, ValueError, KeyError):
            expected = f"{PLAN_FILE_CONTENT} (it is another version's)"
            raise InputError(key, str(path), expected) from None


def distinct_plans(plans: Iterable[Plan]) -> list[Plan]:
    """Return every plan once, where several chains share one.

    Plans are compared by identity, not by their values, which is cheap: chains that
    share a plan share the object. The order is that in which plans first appear.

    Args:
        plans: one for each chain.

    Returns:
        The different objects among them.
    """
    by_identity = {id(plan): plan for plan in plans}
    return list(by_identity.values())


def join_plans(first: Plan, added: Plan) -> Plan:
    """Return the plan of all rounds of a plan and of one that continues it.

    Nothing is planned again. The bound continues, the objective is that of all kept
    rounds, and no lower bound is proven: rounds that are planned later could not be
    taken into account by the first plan.

    Args:
        first: the plan of the rounds that came before.
        added: the plan of the rounds after them, without burn-in.

    Returns:
        The plan, with burn-in, start and ledger of the first one.

    Raises:
        InputError: the second plan does not continue the first.
    """
    if not _continues(first, added):
        raise InputError("added", "another plan", "a plan that continues the first one")
    early = first.certificate
    late = added.certificate
    bound = None
    if early.bound is not None and late.bound is not None:
        bound = np.concatenate([early.bound, late.bound])
    different_notices = dict.fromkeys(early.notices + late.notices)
    certificate = replace(
        early,
        threshold=np.concatenate([early.threshold, late.threshold]),
        bound=bound,
        power_share=np.concatenate([early.power_share, late.power_share]),
        limit=np.concatenate([early.limit, late.limit]),
        objective=_joined_objective(first, added),
        lower_bound=None,
        regime=early.regime if early.regime == late.regime else None,
        gamma=max(early.gamma, late.gamma),
        noise_limit=max(early.noise_limit, late.noise_limit),
        notices=tuple(different_notices),
    )
    rounds = _joined_rounds(first, added)
    return Plan(rounds, certificate, first.context)


def _continues(first: Plan, added: Plan) -> bool:
    """Return whether a plan begins where another one ends, for the same chains."""
    return (
        added.start == first.start + len(first.rounds)
        and added.burn_in == 0
        and added.devices == first.devices
        and added.dim == first.dim
        and added.certificate.objective_name == first.certificate.objective_name
    )


def _joined_rounds(first: Plan, added: Plan) -> Rounds:
    """Return the rounds of both plans."""
    early = first.rounds
    late = added.rounds
    received = None
    if early.received is not None or late.received is not None:
        received = np.concatenate([_received_or_ones(early), _received_or_ones(late)])
    return Rounds(
        step_size=np.concatenate([early.step_size, late.step_size]),
        gain=np.concatenate([early.gain, late.gain]),
        weight=np.concatenate([early.weight, late.weight]),
        server_noise=np.concatenate([early.server_noise, late.server_noise]),
        received=received,
    )


def _received_or_ones(rounds: Rounds) -> Array:
    """Return |h/ĥ|[S, K], which is 1 where a plan has None."""
    if rounds.received is None:
        return np.ones_like(rounds.weight)
    return np.asarray(rounds.received)


def _joined_objective(first: Plan, added: Plan) -> float:
    """Return the objective over the kept rounds of both plans."""
    objectives = [first.objective, added.objective]
    match first.certificate.objective_name:
        case "average":
            counts = [len(first.rounds) - first.burn_in, len(added.rounds)]
            return float(np.average(objectives, weights=counts))
        case "transcript":  # 1/V is the sum over the rounds
            return 1 / (1 / first.objective + 1 / added.objective)
        case _:
            return float(np.maximum(first.objective, added.objective))


def _plan_arrays(plan: Plan) -> storage.Arrays:
    """Return all fields of a plan as arrays, by dotted names; None is left out."""
    certificate = _field_values(plan.certificate)
    del certificate["notices"]
    certificate["notices.code"] = np.array(codes(plan.notices), dtype=str)
    certificate["notices.text"] = np.array(plan.warnings, dtype=str)

    context = _field_values(plan.context)
    del context["privacy"]
    del context["dynamics"]
    for name, value in _field_values(plan.privacy).items():
        context[f"privacy.{name}"] = value
    context["dynamics.name"] = plan.dynamics.name
    for name, value in plan.dynamics.parameters.items():
        context[f"dynamics.{name}"] = value

    parts = {
        "rounds": _field_values(plan.rounds),
        "certificate": certificate,
        "context": context,
    }
    arrays: dict[str, np.ndarray] = {}
    for part, values in parts.items():
        for name, value in values.items():
            if value is not None:
                arrays[f"{part}.{name}"] = np.asarray(value)
    return arrays


def _field_values(part: Rounds | Certificate | Context | Privacy) -> dict[str, object]:
    """Return the values of a dataclass by the names of its fields, in their order."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


def _fields_of_part(arrays: storage.Arrays, part: str) -> dict[str, Any]:
    """Return the arrays of a plan file whose names begin with `part.`.

    It undoes `_plan_arrays` for a part such as `context`, or a nested one such as
    `context.privacy`. Keys are the rest of the names, dotted where `part` has nested
    parts, as `privacy.epsilon` of `context`. Arrays of one number become numbers.
    """
    prefix = f"{part}."
    values: dict[str, object] = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            field_name = name.removeprefix(prefix)
            values[field_name] = array.item() if array.ndim == 0 else array
    return values


def _certificate_in(arrays: storage.Arrays) -> Certificate:
    """Return the certificate of a file, in which fields that are None are left out."""
    values = _fields_of_part(arrays, "certificate")
    for name in ("bound", "lower_bound", "regime"):
        values.setdefault(name, None)
    notice_codes = values.pop("notices.code").tolist()
    notice_texts = values.pop("notices.text").tolist()
    pairs = zip(notice_codes, notice_texts, strict=True)
    notices = tuple(Notice(code, text) for code, text in pairs)
    return Certificate(**values, notices=notices)


def _context_in(arrays: storage.Arrays) -> Context:
    """Return the context of a file, with its promise and its dynamics."""
    values = _fields_of_part(arrays, "context")
    own_values = {name: value for name, value in values.items() if "." not in name}
    privacy = Privacy(**_fields_of_part(arrays, "context.privacy"))
    dynamics = from_constants(_fields_of_part(arrays, "context.dynamics"))
    return Context(**own_values, privacy=privacy, dynamics=dynamics)
