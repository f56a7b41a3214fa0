"""An interior-point method made for the power problem.

Its work is nearly linear in the number of (round, device) pairs. Arrays of the path
have one entry for each round, and for the devices whose budget may bind.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import dtbsv
from scipy.linalg.lapack import dpotrf, dpotrs, dpttrf, dpttrs

from wflmc.planning.solvers.program import Array, PowerProgram, Usage, price_of_rounds

# The methods' wrappers cost more than the work on short arrays.
_max = np.maximum.reduce
_min = np.minimum.reduce

MIN_FIRST_DEVICES = 16
"""Devices that are in the working set from the start, at least."""
MIN_ADMITTED_DEVICES = 8
"""Devices that may join the working set in a step, at least."""
MIN_CENTERING_WITH_FLOORS = 0.1
"""Fraction of the present gap that every step aims at where there are floors.

Floors close to what a budget allows leave a thin interior: there, hurrying loses the
way.
"""
MIN_STEP = 1e-3
"""The path ends where primal and dual steps together are no longer than this."""
INTERIOR = 1e-11
"""Floors are lowered by this fraction.

It leaves an interior where floor = cap, or where the floors use up a budget.
"""
MIN_SLACK = 1e-14
"""The least slack of a budget at the start, as a fraction of the budget."""
MIN_DETERMINANT = 1e-16
"""The least determinant of a 2×2 matrix, over the square of its other entry."""


class NesterovToddScaling(NamedTuple):
    """The Nesterov-Todd scaling of every round: the matrix P with P X P = Z.

    In closed form P is a multiple of Z/√det Z + adj(X)/√det X. Symmetric 2×2 matrices
    are held as [3, S]: both diagonal entries and the other one.
    """

    matrix: Array
    """P, [3, S]."""
    matrix_det: Array
    """det P, [S]."""
    dets: Array
    """det X and det Z, [2, S]."""
    scaled_det: Array
    """Determinant of the scaled point, to which P's root takes X, [S]."""
    scaled_trace: Array
    """Its trace, [S]."""
    adjugate: Array
    """adj X, [3, S]."""


class NoiseSystem(NamedTuple):
    """The system (diag(k) + L' D L) v = right, where L sums with decay.

    D has the prices over the slacks of t - B on its diagonal, 0 in burn-in; for the
    objective "average" it is 0.
    """

    decay: Array
    """From each round to the next, [S − 1]."""
    diagonal: Array
    """k, [S]."""
    tridiagonal: tuple[Array, Array] | None
    """Factor of the system for L v; None where D is 0."""

    def solve(self, right: Array) -> Array:
        """Solve the system.

        It is tridiagonal in terms of L v, because the inverse of L is bidiagonal, so
        that the work is linear in the number of rounds. Where D is 0 the system is
        diagonal.

        Args:
            right: right-hand sides, [S] or [S, n].

        Returns:
            v, of the same shape.
        """
        if self.tridiagonal is None:
            return (right.T / self.diagonal).T
        y = right.copy(order="F")
        y[:-1] -= (self.decay * right[1:].T).T
        diagonal, off_diagonal = self.tridiagonal
        y = dpttrs(diagonal, off_diagonal, y, overwrite_b=1)[0]
        y[1:] -= (self.decay * y[:-1].T).T
        return y


class LevelTerms(NamedTuple):
    """What the elimination of the level t leaves, for the objective "worst"."""

    curvature: float
    """Of t, once v is eliminated."""
    gradient: Array
    """L'D1, the derivative by v, [S]."""
    noise: Array
    """How v follows t, [S]."""
    device: Array
    """How the equations of devices depend on t, [n]."""


class NewtonSystem(NamedTuple):
    """Newton's system at a point, down to one equation per device."""

    budget_ratio: Array
    """Prices over slacks of the budgets, [n]."""
    price: Array
    """Of every round, for the devices in the working set, [S]."""
    unspent: Array
    """Of every budget, as a fraction of it, [n]."""
    a_diagonal: Array
    """Of the power, which is eliminated first, [S]."""
    coupling: Array
    """Of the power and the noise, over the former, [S]."""
    noise_system: NoiseSystem
    """Of the noise, which is eliminated next."""
    noise_of_device: Array
    """How v follows the prices of devices, [S, n]."""
    level: LevelTerms | None
    """Of the level, which comes last; None for the objective "average"."""
    factor: Array
    """Cholesky factor of the equations of devices, [n, n]."""


class PowerDirection(NamedTuple):
    """A step of the primal unknowns."""

    point: Array
    """Of power and noise, [2, S]."""
    relative_slacks: Array
    """Of the slacks, over them."""
    level: float
    """Of t."""


class PowerPath:
    """Primal-dual interior point for the power problem.

    It has Nesterov-Todd scaling and Mehrotra's corrector. Primal: power a, noise v with
    a v >= cost, level t >= base + L v, where L sums with decay rho[s]^2. Dual: a 2x2
    matrix [y -z; -z W] per round, with y = (prices of its devices) + (price of its cap)
    - (price of its floor) and W = L'w. All of this is linear; only a v >= cost is not,
    and it says that [a d; d v] with d = sqrt(cost) is positive semidefinite.

    `matrices[0]` = (a, v, d) and `matrices[1]` = (y, W, -z) hold these matrices;
    `slacks` and `slack_prices` stack the others: caps, floors, budgets (as fractions of
    the budget), and for "worst" t - B, priced by the weights w.

    Args:
        program: the problem.
        usage: what devices spend on a plan of it.
        binding: numbers of the devices whose budget may bind.
    """

    def __init__(
        self, program: PowerProgram, usage: Usage, binding: NDArray[np.intp]
    ) -> None:
        rounds = program.cap.size
        self.program = program
        self.usage = usage
        self.is_worst = program.objective == "worst"
        self.decay = program.decay[1:]
        """From each round to the next, [S − 1]."""
        off_diagonal = np.append(-self.decay, 0.0)
        self.inverse_sum = np.asfortranarray(np.stack([np.ones(rounds), off_diagonal]))
        """Bands of the inverse of L."""

        self.waiting = binding
        """Devices outside the working set."""
        self.waiting_prices = np.zeros(program.budget.size)
        """1/budget for them, 0 for all others, [K]."""
        self.waiting_prices[binding] = 1 / program.budget[binding]
        self.devices = binding[:0]
        """The working set: devices whose budgets the path knows, [n]."""
        self.budget_use = np.zeros((0, rounds))
        """active/budget of them, [n, S]."""

        kept_rounds = rounds - program.burn_in
        self.weights = np.full(kept_rounds, 1 / kept_rounds)
        """w, [S_u]."""
        self.level = 0.0
        self.gap = np.inf
        """Between primal and dual as if both were feasible, relative to the value."""
        self._set_first_point()

    def _set_first_point(self) -> None:
        """Start on the path.

        There the product of both matrices of a round is a multiple of the identity, the
        same in all rounds.
        """
        program = self.program
        rounds = program.cap.size
        W = self._transposed_sum(self.weights)
        floor = program.floor * (1 - INTERIOR)
        self.floored = np.flatnonzero(floor > 0)
        """Rounds with a floor."""
        a = self._feasible_power(W, floor)
        total_cost = float(W @ (program.cost / a))
        self.mean_product = total_cost / rounds
        """Of slacks and prices, to which a step of the path refers."""
        root_cost = np.sqrt(program.cost)
        primal = [a, program.cost / a + self.mean_product / W, root_cost]
        price = (self.mean_product + program.cost * W / a) / a
        dual = [price, W, -root_cost * W / a]
        self.matrices = np.stack([primal, dual])
        above_floor = (a - floor)[self.floored]
        self.slacks = np.concatenate([program.cap - a, above_floor])
        self.slack_prices = self.mean_product / self.slacks
        self.boxes = self.slacks.size
        """How many of the slacks belong to caps and floors."""
        if self.is_worst:
            noise = self._sum(self.matrices[0, 1])
            bounds = (program.base + noise)[program.burn_in :]
            self.level = float(bounds.max()) + 0.2 * total_cost
            self.slacks = np.concatenate([self.slacks, self.level - bounds])
            self.slack_prices = np.concatenate([self.slack_prices, self.weights])
        self._admit(max(MIN_FIRST_DEVICES, int(0.5 * rounds**0.5)), np.inf)
        prices = self.slack_prices[self._at_budgets]
        np.maximum(prices, total_cost / self.devices.size, out=prices)

    @property
    def _at_budgets(self) -> slice:
        """Where budgets are in a stack."""
        return slice(self.boxes, self.boxes + self.devices.size)

    @property
    def power(self) -> Array:
        """Return a, the power of every round at the present point, [S].

        It is inside caps and floors, but a point of the path is not yet a plan: it may
        overspend budgets, in particular those that the working set does not contain.
        `PowerIncumbent.feasible` makes a plan of it.
        """
        return self.matrices[0, 0]

    @property
    def device_prices(self) -> Array:
        """Return λ of the devices in the working set, by `devices`, [n].

        They are what the objective would gain from one unit more of a device's budget,
        and together with the weights of the kept rounds they give a lower bound on all
        plans. All other devices have the price 0.
        """
        prices = self.slack_prices[self._at_budgets]
        return prices / self.program.budget[self.devices]

    def _feasible_power(self, W: Array, floor: Array) -> Array:
        """Return power inside caps and budgets.

        Before caps it is optimal for weights W and equal prices per budget.
        """
        program = self.program
        price = price_of_rounds(program.active, self.waiting_prices)
        smallest_price = price[price > 0].min()
        a = np.sqrt(program.cost * W / np.maximum(price, smallest_price))
        a = np.maximum(a, 1e-12 * a.max())
        # Twice, as caps leave something of the budgets that other rounds may use.
        for fraction in (0.5, 0.9):
            largest_use = float(np.max(self.usage(a) / program.budget))
            a = np.minimum(a * (0.98 / largest_use), fraction * program.cap)
        if self.floored.size:
            rise = np.maximum(a - floor, 0.1 * (program.cap - floor))
            available = program.budget - self.usage(floor)
            available = np.maximum(available, MIN_SLACK * program.budget)
            largest_use = float(np.max(self.usage(rise) / available))
            a = floor + rise * min(1.0, 0.5 / largest_use)
        return a

    def _sum(self, x: Array) -> Array:
        """Return L x."""
        return dtbsv(1, self.inverse_sum, x, lower=1, diag=1)

    def _transposed_sum(self, w: Array) -> Array:
        """Return L'w for w of the kept rounds."""
        full = np.zeros(self.program.cap.size)
        full[self.program.burn_in :] = w
        return dtbsv(1, self.inverse_sum, full, lower=1, trans=1, diag=1, overwrite_x=1)

    def _admit(self, max_count: int, reach: float) -> None:
        """Move devices into the working set: those that spend the most.

        Args:
            max_count: how many at most.
            reach: only devices that are nearer than this to their budget, as a fraction
                of it.
        """
        program = self.program
        spent = self.usage(self.power) * self.waiting_prices
        if 1 - _max(spent) >= reach:
            return
        slack = 1 - spent[self.waiting]
        near = np.flatnonzero(slack < reach)
        near = near[np.argsort(slack[near], kind="stable")[:max_count]]
        admitted = self.waiting[near]
        slack = np.maximum(np.abs(slack[near]), MIN_SLACK)
        self.waiting = np.delete(self.waiting, near)
        self.waiting_prices[admitted] = 0.0
        budget_use = program.active[:, admitted].T / program.budget[admitted, None]
        is_needed = self._is_needed(admitted, budget_use)
        end = self.boxes + self.devices.size
        slack = slack[is_needed]
        self.slacks = np.insert(self.slacks, end, slack)
        prices = self.mean_product / slack
        self.slack_prices = np.insert(self.slack_prices, end, prices)
        self.devices = np.concatenate([self.devices, admitted[is_needed]])
        self.budget_use = np.concatenate([self.budget_use, budget_use[is_needed]])

    def _is_needed(
        self, admitted: NDArray[np.intp], budget_use: Array
    ) -> NDArray[np.bool_]:
        """Return which devices the working set does not yet imply.

        A device whose rounds are a subset of another's and whose budget is not smaller
        adds nothing; of two that imply each other, the earlier one stays.

        Args:
            admitted: numbers of the devices.
            budget_use: active/budget of them, [i, S].
        """
        active = np.concatenate([self.budget_use, budget_use]) > 0
        active = active.astype(np.float32)
        devices = np.concatenate([self.devices, admitted])
        budget = self.program.budget[devices]
        is_subset = active @ active.T >= active.sum(1)[:, None]
        is_not_smaller = budget[:, None] >= budget
        has_certain_activity = self.program.active.dtype == bool
        implied = is_subset & is_not_smaller & has_certain_activity
        is_earlier = implied.T & np.triu(np.ones_like(implied))
        is_implied = np.any(implied & ~is_earlier, axis=1)
        return ~is_implied[self.devices.size :]

    def _measure(self) -> None:
        """Set `gap` and `mean_product` to those of the present point."""
        X, Z = self.matrices
        total = float(self.slacks @ self.slack_prices + np.vdot(X, Z) + X[2] @ Z[2])
        self.mean_product = total / (self.slacks.size + 2 * X.shape[1])
        value = self.level
        if not self.is_worst:
            bounds = (self.program.base + self._sum(X[1]))[self.program.burn_in :]
            value = float(self.weights @ bounds)
        self.gap = total / abs(value)

    def step(self) -> bool:
        """Move to the next point of the path, by a predictor and a corrector.

        Devices that come near their budgets join the working set first. The predictor
        aims at a gap of zero; how far it could go decides what the corrector aims at,
        which also removes the predictor's second-order error (worked out for 2x2
        matrices).

        Returns:
            False where rounding leaves no way forward; the point is then as before.
        """
        self._admit_near_devices()
        scaling = self._scaling()
        system = self._newton_system(scaling)
        if system is None:
            return False
        no_aim = np.zeros(self.slacks.size)
        no_matrix_aim = np.zeros(scaling.matrix.shape)
        predictor = self._direction(system, no_aim, no_matrix_aim)
        length = self._predictor_length(predictor, scaling)
        centering = MIN_CENTERING_WITH_FLOORS if self.floored.size else 0.0
        target = self.mean_product * max(centering, (1 - length) ** 1.5)
        relative = predictor.relative_slacks
        products = self.slacks * self.slack_prices
        aim = -relative * (1 + relative) - target / products
        matrix_aim = self._corrector_aim(predictor, scaling, target)
        corrector = self._direction(system, aim * self.slack_prices, matrix_aim)
        return self._move(corrector, scaling, aim, matrix_aim, length)

    def _admit_near_devices(self) -> None:
        """Let devices join the working set whose budgets begin to matter."""
        if not self.waiting.size:
            return
        total_price = self.slack_prices[self._at_budgets].sum()
        max_count = max(MIN_ADMITTED_DEVICES, self.devices.size // 2)
        self._admit(max_count, 3 * self.mean_product / total_price)

    def _predictor_length(
        self, predictor: PowerDirection, scaling: NesterovToddScaling
    ) -> float:
        """Return how much of the predictor's step is possible, at most 1."""
        X = self.matrices[0]
        da, dv = predictor.point
        det = scaling.dets[0]
        half = 0.5 * (X[1] * da + X[0] * dv) / det
        product = da * dv / det
        # half ∓ spread are the eigenvalues of X⁻¹ dX.
        spread = np.sqrt(np.maximum(half * half - product, 0.0))
        relative = predictor.relative_slacks
        return 1 / max(
            1.0,
            _max(spread - half),
            -_min(relative),
            1 + _max(half + spread),
            1 + _max(relative),
        )

    def _corrector_aim(
        self, predictor: PowerDirection, scaling: NesterovToddScaling, target: float
    ) -> Array:
        """Return the right-hand side of the matrices for the corrector, [3, S].

        Args:
            predictor: whose second-order error is removed.
            scaling: at the present point.
            target: the mean product that is aimed at.
        """
        P = scaling.matrix
        X = self.matrices[0]
        da, dv = predictor.point
        det = scaling.dets[0]
        half = 0.5 * (X[1] * da + X[0] * dv) / det
        product = da * dv / det
        scaled = P[0] * da + P[1] * dv
        m = scaled / scaling.scaled_trace
        second_order = scaling.scaled_det * (2 * m * half - product)
        of_adjugate = ((target + second_order) / det) * scaling.adjugate
        aim = of_adjugate + (scaled + m * scaled) * P
        det_p = scaling.matrix_det
        aim[:2] -= (det_p + 2 * m * det_p) * predictor.point[::-1]
        return aim

    def _move(
        self,
        corrector: PowerDirection,
        scaling: NesterovToddScaling,
        aim: Array,
        matrix_aim: Array,
        predictor_length: float,
    ) -> bool:
        """Move along the corrector, as far as both points stay inside.

        Args:
            corrector: the primal step.
            scaling: at the present point.
            aim: relative change of the products of slacks and prices.
            matrix_aim: the same for the matrices, [3, S].
            predictor_length: how good the predictor was.

        Returns:
            False where nearly no step is possible.
        """
        M = self.matrices
        relative = corrector.relative_slacks
        relative_prices = -(1 + aim + relative)
        dM = self._matrix_step(corrector, scaling, matrix_aim)
        both = M[:, 0] * dM[:, 1] + M[:, 1] * dM[:, 0]
        half = (0.5 * both - M[:, 2] * dM[:, 2]) / scaling.dets
        product = (dM[:, 0] * dM[:, 1] - dM[:, 2] * dM[:, 2]) / scaling.dets
        spread = np.sqrt(np.maximum(half * half - product, 0.0))
        fall = _max(spread - half, axis=1)
        # Stay off the boundary, the less so the better the predictor did.
        fraction = 0.9 + 0.1 * predictor_length
        primal_length = fraction / max(1.0, fall[0], -_min(relative))
        dual_length = fraction / max(1.0, fall[1], -_min(relative_prices))
        if not primal_length + dual_length > MIN_STEP:  # also where they are nan
            return False
        dM[0] *= primal_length
        dM[1] *= dual_length
        self.matrices = M + dM
        self.level = self.level + primal_length * corrector.level
        self.slacks = self.slacks + primal_length * (self.slacks * relative)
        price_step = self.slack_prices * relative_prices
        self.slack_prices = self.slack_prices + dual_length * price_step
        if self.is_worst:
            self.weights = self.slack_prices[self._at_budgets.stop :]
        self.matrices[1, 1] = self._transposed_sum(self.weights)
        self._measure()
        return True

    def _matrix_step(
        self, corrector: PowerDirection, scaling: NesterovToddScaling, matrix_aim: Array
    ) -> Array:
        """Return the full step of both matrices of every round, [2, 3, S]."""
        M = self.matrices
        P = scaling.matrix
        da, dv = corrector.point
        step = np.empty(M.shape)
        step[0, :2] = corrector.point
        step[0, 2] = 0.0
        step[1] = matrix_aim - M[1] - (P[0] * da + P[1] * dv) * P
        step[1, :2] += scaling.matrix_det * corrector.point[::-1]
        return step

    def _scaling(self) -> NesterovToddScaling:
        """Return the scaling at the present point."""
        M = self.matrices
        X, Z = M
        off = M[:, 2] * M[:, 2]
        dets = np.maximum(M[:, 0] * M[:, 1] - off, MIN_DETERMINANT * off)
        root_x, root_z = np.sqrt(dets)
        scaled_det = root_x * root_z
        inner = X * Z
        adjugate = X[[1, 0, 2]]
        adjugate[2] *= -1
        trace_of_product = inner[0] + inner[1] + 2 * inner[2]
        square = np.maximum(trace_of_product, 2 * scaled_det) + 2 * scaled_det
        scaled_trace = np.sqrt(square)
        mean = Z / root_z + adjugate / root_x
        return NesterovToddScaling(
            matrix=mean * (root_z / scaled_trace),
            matrix_det=root_z / root_x,
            dets=dets,
            scaled_det=scaled_det,
            scaled_trace=scaled_trace,
            adjugate=adjugate,
        )

    def _newton_system(self, scaling: NesterovToddScaling) -> NewtonSystem | None:
        """Eliminate a, then v (tridiagonal in terms of L v), then t.

        Returns:
            What is left, one equation per device; None where rounding makes it
            indefinite.
        """
        P = scaling.matrix
        rounds = self.program.cap.size
        E = self.budget_use
        ratio: Array = self.slack_prices / self.slacks
        box = ratio[:rounds].copy()
        box[self.floored] += ratio[rounds : self.boxes]
        squares = P * P
        a_diagonal = squares[0] + box
        both = scaling.matrix_det * (P[0] * P[1] + squares[2])
        noise_diagonal = (both + squares[1] * box) / a_diagonal
        coupling = squares[2] / a_diagonal

        level_ratio = ratio[self._at_budgets.stop :]
        noise_system = self._noise_system(noise_diagonal, level_ratio)
        if noise_system is None:
            return None
        noise_of_device = noise_system.solve((E * coupling).T)
        G = E @ (E / a_diagonal + coupling * noise_of_device.T).T
        budget_ratio = ratio[self._at_budgets]
        G.flat[:: self.devices.size + 1] += 1 / budget_ratio
        level = None
        if self.is_worst:
            level = self._level_terms(noise_system, level_ratio, coupling)
            G += level.device[:, None] * (level.device / level.curvature)
        factor, info = dpotrf(G, lower=1, overwrite_a=1)
        if info != 0:
            return None
        return NewtonSystem(
            budget_ratio=budget_ratio,
            price=self.slack_prices[self._at_budgets] @ E,
            unspent=1 - E @ self.power,
            a_diagonal=a_diagonal,
            coupling=coupling,
            noise_system=noise_system,
            noise_of_device=noise_of_device,
            level=level,
            factor=factor,
        )

    def _noise_system(self, diagonal: Array, level_ratio: Array) -> NoiseSystem | None:
        """Return the system of the noise; None where rounding makes it indefinite.

        Args:
            diagonal: without the level's part, [S].
            level_ratio: prices over slacks of t - B, [S_u]; empty for "average".
        """
        if not self.is_worst:
            return NoiseSystem(self.decay, diagonal, tridiagonal=None)
        decay = self.decay
        summed_diagonal = diagonal.copy()
        summed_diagonal[self.program.burn_in :] += level_ratio
        summed_diagonal[:-1] += decay * decay * diagonal[1:]
        # LAPACK's wrapper wants an entry off the diagonal even for a single round.
        off_diagonal = np.zeros(1)
        if diagonal.size > 1:
            off_diagonal = -decay * diagonal[1:]
        factor, off_factor, info = dpttrf(summed_diagonal, off_diagonal)
        if info:
            return None
        return NoiseSystem(decay, diagonal, tridiagonal=(factor, off_factor))

    def _level_terms(
        self, noise_system: NoiseSystem, level_ratio: Array, coupling: Array
    ) -> LevelTerms:
        """Return what the elimination of the level leaves.

        Args:
            noise_system: of the noise.
            level_ratio: prices over slacks of t - B, [S_u].
            coupling: of power and noise, [S].
        """
        assert noise_system.tridiagonal is not None
        diagonal, off_diagonal = noise_system.tridiagonal
        # curvature = Σ D − gradient · noise, written without the cancellation.
        right = noise_system.diagonal.copy()
        right[1:] *= 1 - self.decay
        right[:-1] -= self.decay * right[1:]
        solution = dpttrs(diagonal, off_diagonal, right)[0]
        gradient = self._transposed_sum(level_ratio)
        noise = noise_system.solve(gradient)
        return LevelTerms(
            curvature=level_ratio @ solution[self.program.burn_in :],
            gradient=gradient,
            noise=noise,
            device=self.budget_use @ (coupling * noise),
        )

    def _direction(
        self, system: NewtonSystem, aim: Array, matrix_aim: Array
    ) -> PowerDirection:
        """Return the Newton step for some right-hand sides.

        Args:
            system: at the present point.
            aim: right-hand side of slacks and prices, stacked.
            matrix_aim: right-hand side of the matrices, [3, S].
        """
        rounds = self.program.cap.size
        E = self.budget_use
        at_budgets = self._at_budgets
        level_aim = aim[at_budgets.stop :]
        level = system.level

        a_right = matrix_aim[0] + aim[:rounds] - system.price
        a_right[self.floored] -= aim[rounds : self.boxes]
        gradient = -self.matrices[1, 1]
        if level is not None:
            gradient = self._transposed_sum(level_aim)
        noise_right = matrix_aim[1] + gradient
        reduced_right = noise_right - system.coupling * a_right
        v = system.noise_system.solve(reduced_right)
        device_right = -system.unspent - aim[at_budgets] / system.budget_ratio
        device_right += E @ (a_right / system.a_diagonal - system.coupling * v)
        dt = 0.0
        if level is not None:
            level_right = 1 + np.add.reduce(level_aim)
            dt = (level.gradient @ v - level_right) / level.curvature
            device_right -= level.device * dt

        prices = dpotrs(system.factor, device_right, lower=1)[0]
        v += system.noise_of_device @ prices
        if level is not None:
            dt += level.device @ prices / level.curvature
            v += level.noise * dt
        priced_right = (a_right - prices @ E) / system.a_diagonal
        point = np.empty((2, rounds))
        point[0] = priced_right - system.coupling * v
        point[1] = v
        slacks = np.empty(self.slacks.size)
        slacks[:rounds] = -point[0]
        slacks[rounds : self.boxes] = point[0][self.floored]
        unexplained = system.unspent - self.slacks[at_budgets]
        slacks[at_budgets] = unexplained - E @ point[0]
        if level is not None:
            slacks[at_budgets.stop :] = dt - self._sum(v)[self.program.burn_in :]
        return PowerDirection(point, slacks / self.slacks, dt)
