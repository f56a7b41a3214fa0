"""An interior-point method made for the power problem: nearly linear in the number of (round, device) pairs."""

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import dtbsv
from scipy.linalg.lapack import dpotrf, dpotrs, dpttrf, dpttrs

from wflmc.planning.solvers.program import Array, Program, Usage, price_of_rounds

_max, _min = (
    np.maximum.reduce,
    np.minimum.reduce,
)  # the methods' wrappers cost more than the work on short arrays


class PowerPath:
    """Primal-dual interior point (Nesterov-Todd scaling, Mehrotra's corrector) made for this problem's structure.

    Primal: power a, noise v with a*v >= cost, level t >= base + L v, where L sums with decay rho[s]^2. Dual: a 2x2
    matrix [y -z; -z W] per round, with y = (prices of its devices) + (price of its cap) - (price of its floor) and
    W = L'w. All of this is linear; only a*v >= cost is not, and it says that [a d; d v] with d = sqrt(cost) is
    positive semidefinite. M[0] = (a, v, d) and M[1] = (y, W, -z) hold these matrices; `x` and `s` stack the other
    slacks and their prices: caps, floors, budgets (as fractions of the budget), and for "worst" t - B, priced w.
    """

    def __init__(self, p: Program, use: Usage, binding: NDArray[np.intp]) -> None:
        self.p, self.use, self.t, rounds = p, use, 0.0, p.cap.size
        self.gap = np.inf
        """Between primal and dual as if both were feasible, relative to the value."""
        self.r = p.decay[1:]  # from each round to the next, [S - 1]
        self.worst = p.objective == "worst"
        self.waiting = binding  # devices outside the working set
        self.outside = np.zeros(p.budget.size)  # 1 / budget for them, 0 for all others
        self.outside[binding] = 1 / p.budget[binding]
        self.rows, self.E = (
            binding[:0],
            np.zeros((0, rounds)),
        )  # the working set; E[i, s] = active / budget
        self.band = np.asfortranarray(
            np.stack([np.ones(rounds), np.append(-self.r, 0.0)])
        )  # the inverse of L
        self.w = np.full(rounds - p.burn_in, 1 / (rounds - p.burn_in))
        W = self._spread(self.w)
        floor = p.floor * (
            1 - 1e-11
        )  # leaves an interior where floor = cap or the floors use up a budget
        self.floored = np.flatnonzero(floor > 0)
        a = self._start(W, floor)
        # The path is where the product of a round's two matrices is mu times the identity: start on it.
        total = float(W @ (p.cost / a))
        self.mu = total / rounds
        d = np.sqrt(p.cost)
        self.M = np.stack(
            [
                [a, p.cost / a + self.mu / W, d],
                [(self.mu + p.cost * W / a) / a, W, -d * W / a],
            ]
        )
        self.x = np.concatenate([p.cap - a, (a - floor)[self.floored]])
        self.s, self.boxes = self.mu / self.x, self.x.size
        if self.worst:
            bounds = (p.base + self._sum(self.M[0, 1]))[p.burn_in :]
            self.t = float(bounds.max()) + 0.2 * total
            self.x, self.s = (
                np.concatenate([self.x, self.t - bounds]),
                np.concatenate([self.s, self.w]),
            )
        self._admit(max(16, int(0.5 * rounds**0.5)), np.inf)
        prices = self.s[self.boxes : self.boxes + self.rows.size]
        np.maximum(prices, total / self.rows.size, out=prices)

    def _start(self, W: Array, floor: Array) -> Array:
        """A plan inside caps and budgets: optimal for weights W and equal prices per budget, before caps."""
        p, price = self.p, price_of_rounds(self.p.active, self.outside)
        a = np.sqrt(p.cost * W / np.maximum(price, price[price > 0].min()))
        a = np.maximum(a, 1e-12 * a.max())
        for share in (0.5, 0.9):
            a = np.minimum(a * (0.98 / np.max(self.use(a) / p.budget)), share * p.cap)
        if self.floored.size:
            rise = np.maximum(a - floor, 0.1 * (p.cap - floor))
            room = np.maximum(p.budget - self.use(floor), 1e-14 * p.budget)
            a = floor + rise * min(1.0, 0.5 / float(np.max(self.use(rise) / room)))
        return a

    def _sum(self, x: Array) -> Array:
        """L x."""
        return dtbsv(1, self.band, x, lower=1, diag=1)

    def _spread(self, w: Array) -> Array:
        """L'w with w given for the rounds that count."""
        full = np.zeros(self.p.cap.size)
        full[self.p.burn_in :] = w
        return dtbsv(1, self.band, full, lower=1, trans=1, diag=1, overwrite_x=1)

    def _admit(self, most: int, reach: float) -> None:
        """Move up to `most` devices into the working set: those that spend the most, up to `reach` below budget."""
        p, old = self.p, self.rows.size
        spent = self.use(self.M[0, 0]) * self.outside
        if 1 - _max(spent) >= reach:
            return
        slack = 1 - spent[self.waiting]
        near = np.flatnonzero(slack < reach)
        near = near[np.argsort(slack[near], kind="stable")[:most]]
        k, slack = self.waiting[near], np.maximum(np.abs(slack[near]), 1e-14)
        self.waiting = np.delete(self.waiting, near)
        self.outside[k] = 0.0
        E, every = p.active[:, k].T / p.budget[k, None], np.concatenate([self.rows, k])
        # A device whose rounds are a subset of another's and whose budget is not smaller adds nothing; of two that
        # say the same, the earlier one stays.
        on, budget = (
            (np.concatenate([self.E, E]) > 0).astype(np.float32),
            p.budget[every],
        )
        implied = (
            (on @ on.T >= on.sum(1)[:, None])
            & (budget[:, None] >= budget)
            & (p.active.dtype == bool)
        )
        keep = ~np.any(implied & ~(implied.T & np.triu(np.ones_like(implied))), axis=1)[
            old:
        ]
        self.rows, self.E = (
            np.concatenate([self.rows, k[keep]]),
            np.concatenate([self.E, E[keep]]),
        )
        self.x = np.insert(self.x, self.boxes + old, slack[keep])
        self.s = np.insert(self.s, self.boxes + old, self.mu / slack[keep])

    def _measure(self) -> None:
        """Set `gap` and `mu` to those of the present point."""
        X, Z = self.M
        total = float(self.x @ self.s + np.vdot(X, Z) + X[2] @ Z[2])
        self.mu = total / (self.x.size + 2 * X.shape[1])
        value = (
            self.t
            if self.worst
            else float(self.w @ (self.p.base + self._sum(X[1]))[self.p.burn_in :])
        )
        self.gap = total / abs(value)

    def step(self) -> bool:
        """One predictor-corrector step; False when rounding leaves no way forward."""
        n = self.rows.size
        if self.waiting.size:
            self._admit(
                max(8, n // 2), 3 * self.mu / self.s[self.boxes : self.boxes + n].sum()
            )
        M, (X, Z), x, s = self.M, self.M, self.x, self.s
        P, det_p, det, both, trace, adj = self._scaling()
        if not self._factor(P, det_p):
            return False
        # Predictor: how far could we go if we aimed at a gap of zero?
        dA, rel, _ = self._direction(np.zeros(x.size), np.zeros(P.shape))
        half, prod = (
            0.5 * (X[1] * dA[0] + X[0] * dA[1]) / det[0],
            dA[0] * dA[1] / det[0],
        )
        spread = np.sqrt(
            np.maximum(half * half - prod, 0.0)
        )  # half -+ spread: eigenvalues of X^-1 dX
        length = 1 / max(
            1.0, _max(spread - half), -_min(rel), 1 + _max(half + spread), 1 + _max(rel)
        )
        # Floors close to what a budget allows leave a thin interior: there, hurrying loses the way.
        target = self.mu * max(0.1 if self.floored.size else 0.0, (1 - length) ** 1.5)
        # Corrector: aim at `target`, with the predictor's second-order error taken off (worked out for 2x2 matrices).
        pd = P[0] * dA[0] + P[1] * dA[1]
        m = pd / trace
        Q = ((target + both * (2 * m * half - prod)) / det[0]) * adj + (pd + m * pd) * P
        Q[:2] -= (det_p + 2 * m * det_p) * dA[::-1]
        ratio = -rel * (1 + rel) - target / (x * s)
        dA, rel, dt = self._direction(ratio * s, Q)
        rel_s = -(1 + ratio + rel)
        dM = np.empty(M.shape)
        dM[0, :2] = dA
        dM[0, 2] = 0.0
        dM[1] = Q - Z - (P[0] * dA[0] + P[1] * dA[1]) * P
        dM[1, :2] += det_p * dA[::-1]
        half = (
            0.5 * (M[:, 0] * dM[:, 1] + M[:, 1] * dM[:, 0]) - M[:, 2] * dM[:, 2]
        ) / det
        prod = (dM[:, 0] * dM[:, 1] - dM[:, 2] * dM[:, 2]) / det
        low = _max(np.sqrt(np.maximum(half * half - prod, 0.0)) - half, axis=1)
        keep = (
            0.9 + 0.1 * length
        )  # stay off the boundary, the less so the better the predictor did
        go, go_s = (
            keep / max(1.0, low[0], -_min(rel)),
            keep / max(1.0, low[1], -_min(rel_s)),
        )
        if not go + go_s > 1e-3:  # also when they are nan
            return False
        dM[0] *= go
        dM[1] *= go_s
        self.M, self.t, self.x, self.s = (
            M + dM,
            self.t + go * dt,
            x + go * (x * rel),
            s + go_s * (s * rel_s),
        )
        if self.worst:
            self.w = self.s[self.boxes + self.rows.size :]
        self.M[1, 1] = self._spread(self.w)
        self._measure()
        return True

    def _scaling(self) -> tuple[Array, Array, Array, Array, Array, Array]:
        """The matrix P with P X P = Z, in closed form: a multiple of Z / sqrt(det Z) + adj(X) / sqrt(det X).

        Returns P, det P, (det X, det Z), determinant and trace of the scaled point (P's root takes X to it), adj X.
        """
        M, (X, Z) = self.M, self.M
        off = M[:, 2] * M[:, 2]
        det = np.maximum(M[:, 0] * M[:, 1] - off, 1e-16 * off)
        root_x, root_z = np.sqrt(det)
        both, inner, adj = root_x * root_z, X * Z, X[[1, 0, 2]]
        adj[2] *= -1
        trace = np.sqrt(
            np.maximum(inner[0] + inner[1] + 2 * inner[2], 2 * both) + 2 * both
        )
        return (
            (Z / root_z + adj / root_x) * (root_z / trace),
            root_z / root_x,
            det,
            both,
            trace,
            adj,
        )

    def _factor(self, P: Array, det_p: Array) -> bool:
        """Eliminate a, then v (tridiagonal in terms of L v), then t; what is left is one equation per device."""
        n, S, r, E, P2 = self.rows.size, self.p.cap.size, self.r, self.E, P * P
        D: Array = self.s / self.x
        self.Dq = D[self.boxes : self.boxes + n]
        self.price, self.free = (
            self.s[self.boxes : self.boxes + n] @ E,
            1 - E @ self.M[0, 0],
        )
        box = D[:S].copy()
        box[self.floored] += D[S : self.boxes]
        self.k1 = P2[0] + box
        self.k2 = (det_p * (P[0] * P[1] + P2[2]) + P2[1] * box) / self.k1
        self.k3 = P2[2] / self.k1
        if self.worst:
            Dp, diag = D[self.boxes + n :], self.k2.copy()
            diag[self.p.burn_in :] += Dp
            diag[:-1] += r * r * self.k2[1:]
            off = (
                -r * self.k2[1:] if S > 1 else np.zeros(1)
            )  # LAPACK's wrapper wants one entry even then
            self.diag, self.off, info = dpttrf(diag, off)
            if info:
                return False
            # kt = sum(Dp) - gt @ vt, written without the cancellation.
            rest = self.k2.copy()
            rest[1:] *= 1 - r
            rest[:-1] -= r * rest[1:]
            self.kt = Dp @ dpttrs(self.diag, self.off, rest)[0][self.p.burn_in :]
            self.gt = self._spread(Dp)
            self.vt = self._noise(self.gt)
        self.vl = self._noise((E * self.k3).T)
        G = E @ (E / self.k1 + self.k3 * self.vl.T).T
        G.flat[:: n + 1] += 1 / self.Dq
        if self.worst:
            self.et = E @ (self.k3 * self.vt)
            G += self.et[:, None] * (self.et / self.kt)
        self.chol, info = dpotrf(G, lower=1, overwrite_a=1)
        return info == 0

    def _noise(self, rhs: Array) -> Array:
        """Solve (diag(k2) + L' Dp L) v = rhs, [S] or [S, n], through the tridiagonal system for L v."""
        if not self.worst:
            return (rhs.T / self.k2).T
        y = rhs.copy(order="F")
        y[:-1] -= (self.r * rhs[1:].T).T
        y = dpttrs(self.diag, self.off, y, overwrite_b=1)[0]
        y[1:] -= (self.r * y[:-1].T).T
        return y

    def _direction(self, g: Array, Q: Array) -> tuple[Array, Array, float]:
        """Newton step for the right-hand sides g (slacks and prices) and Q (matrices): dA, dx / x, dt."""
        n, S, E = self.rows.size, self.p.cap.size, self.E
        at_budget = slice(self.boxes, self.boxes + n)
        f1 = Q[0] + g[:S] - self.price
        f1[self.floored] -= g[S : self.boxes]
        f2 = (
            Q[1] + self._spread(g[at_budget.stop :])
            if self.worst
            else Q[1] - self.M[1, 1]
        )
        right = -self.free - g[at_budget] / self.Dq
        v = self._noise(f2 - self.k3 * f1)
        right += E @ (f1 / self.k1 - self.k3 * v)
        dt = 0.0
        if self.worst:
            dt = (self.gt @ v - (1 + np.add.reduce(g[at_budget.stop :]))) / self.kt
            right -= self.et * dt
        dlam = dpotrs(self.chol, right, lower=1)[0]
        v += self.vl @ dlam
        if self.worst:
            dt += self.et @ dlam / self.kt
            v += self.vt * dt
        dA, dx = np.empty((2, S)), np.empty(self.x.size)
        dA[0] = (f1 - dlam @ E) / self.k1 - self.k3 * v
        dA[1] = v
        dx[:S] = -dA[0]
        dx[S : self.boxes] = dA[0][self.floored]
        dx[at_budget] = self.free - self.x[at_budget] - E @ dA[0]
        if self.worst:
            dx[at_budget.stop :] = dt - self._sum(v)[self.p.burn_in :]
        return dA, dx / self.x, dt
