"""The power problem by its prices: plans in closed form, and Newton's method for the few prices that are not zero."""

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dgesv

from wflmc.planning.solvers.program import Array, Program, Usage
from wflmc.recursion import backward, first_order

_max, _sum_from = np.maximum.reduce, np.add.reduceat
_DEVICES = 32  # each takes a step or two to find: with more of them it gives up


def fill(p: Program, use: Usage, budget: Array, tol: float) -> tuple[Array, Array, Array] | None:
    """Powers that spend `budget` to within tol, weights w[S] and prices lam[K]; None if it gave up.

    The devices with a price are found one by one: the one that overspends most joins, one whose price would turn
    negative leaves. Nothing here is a proof, and no progress is guaranteed: the caller checks what comes back.
    """
    rounds, every = p.cap.size, use.dense
    if every is None or p.floor.any() or np.log(p.rho).sum() < -250:  # the product of rho^2 has to stay a normal float
        return None
    w = np.zeros(rounds)
    w[p.burn_in :] = 1 / (rounds - p.burn_in)
    root = np.sqrt(p.cost * backward(w, p.decay))
    alone = (use(root) / budget) ** 2  # each device's price for "average" if it were alone and there were no caps
    rows = np.array([np.argmax(alone)])
    lam, level, step = alone[rows], 0.0, 0
    with np.errstate(all="ignore"):
        plans: _Average | _Worst = _Average(p.cap, root, w)
        if p.objective == "worst":
            plans = _Worst(p, plans.powers(lam @ every.T[rows], level), lam[0])
            level = plans.first_level
        while 0 < rows.size <= _DEVICES and step < 10 + 2 * rows.size:  # whoever needs more hardly ever gets there
            step += 1
            on = every.T[rows]
            price = lam @ on
            a = plans.powers(price, level)
            spent = use(a) / budget
            here, k = spent[rows], np.argmax(spent)
            error = _max(np.abs(here - 1))
            if error < tol and spent[k] < 1 + tol:
                w, prices = plans.weights(), np.zeros(budget.size)
                total = np.add.reduce(w)
                prices[rows] = lam / total
                return a, w / total, prices
            if spent[k] - 1 > 0.1 * error and spent[k] > _max(here) * (1 + 1e-12):
                rows, lam = np.append(rows, k), np.append(lam, 0.0)
                on, here = every.T[rows], spent[rows]
                if spent[k] > 1.5 or not on[-1] @ plans.free:  # far off, or at its caps: Newton's method would be lost
                    lam[-1] = alone[k]
                    continue
            change, rise, singular = plans.newton(on, price, here, budget[rows])
            if singular:
                return None
            # No price falls by more than 80 % at once: all slow down for it, up to a point. Only small ones leave.
            short = max(0.1, 0.8 / max(0.8, _max(-change / lam)))
            worth, new = lam * budget[rows], lam + short * change
            stays = (new > 0) | (worth > 1e-3 * np.add.reduce(worth))
            rows, lam = rows[stays], np.maximum(new, 0.2 * lam)[stays]
            level = max(level + short * rise, 0.1 * level + 0.9 * plans.least_level)
    return None


class _Average:
    """Plans for "average", where the weights are known: a = sqrt(cost W / price), or the cap if that is less."""

    least_level = 0.0

    def __init__(self, cap: Array, root: Array, w: Array) -> None:
        self.cap, self.root, self.w = cap, root, w  # root = sqrt(cost W)

    def powers(self, price: Array, _level: float) -> Array:
        """The plan for these prices of the rounds."""
        a = self.root / np.sqrt(price)
        self.free = a < self.cap
        self.a = np.minimum(a, self.cap)
        return self.a

    def newton(self, on: Array, price: Array, spent: Array, budget: Array) -> tuple[Array, float, int]:
        """Newton's step for spent = 1: change of the prices, change of the level, and whether it failed."""
        effect = (on * np.where(self.free, self.a / price, 0.0)) @ on.T  # of a price on what is spent, times -2
        # Without caps, spending falls as the square root of the prices: spent^-2 = 1 is the more linear equation.
        _, _, change, info = dgesv(effect, spent * (spent * spent - 1) * budget)
        return change, 0.0, info

    def weights(self) -> Array:
        """The weights w[S] of the rounds' bounds."""
        return self.w


class _Worst:
    """Plans for "worst": the cheapest one for given prices of the rounds that keeps all bounds to a given level.

    In terms of u[s] = g[s] cost[s]/a[s], where g[s-1] = r[s] g[s], r = rho^2 and g = 1 in the first kept round, the
    bound of round s' says that the sum of u up to s' is at most g[s'] (level - base[s']). The cheapest u is q phi with
    q = sqrt(g cost price), but no less than the cap demands, where phi never falls and rises only after a round whose
    bound is tight. If the rounds at their caps are known, that phi is the isotonic regression of (what the sum may
    grow by) / q with weights q. The rounds at their caps are taken from the plan before; when the steps get small,
    they stay the same.
    """

    def __init__(self, p: Program, a: Array, scale: float) -> None:
        """Start from the capped rounds and the level of plan a; `scale` is the size of a price."""
        self.r, self.burn_in, s = p.decay, p.burn_in, np.arange(p.cap.size)
        fallen = np.cumsum(np.log(self.r))
        self.g = np.exp(fallen[p.burn_in] - fallen)
        self.cost = self.g * p.cost
        self.root, self.least = np.sqrt(self.cost), self.cost / p.cap
        self.tiny = np.maximum(1e-13 * scale**0.5 * self.root, 1e-300)  # in place of zero weights
        self.edges = np.append(s[p.burn_in :], s.size)  # the rounds up to burn_in share the first bound
        self.edges[0] = 0
        grown = self.g[p.burn_in :]
        self.per_level = np.diff(grown, prepend=0.0)
        self.offset = np.diff(grown * p.base[p.burn_in :], prepend=0.0)
        self.free = a < p.cap
        self.first_level, self.least_level = (
            float(_max((p.base + first_order(p.cost / x, self.r))[p.burn_in :])) for x in (a, p.cap)
        )

    def powers(self, price: Array, level: float) -> Array:
        """The plan for these prices of the rounds and this level, if the same rounds are at their caps as before."""
        self.q = self.root * np.sqrt(price)
        weight = _sum_from(np.maximum(self.q * self.free, self.tiny), self.edges[:-1])
        room = level * self.per_level - self.offset - _sum_from(np.where(self.free, 0.0, self.least), self.edges[:-1])
        self.blocks, self.weight, self.mean = pool(room, weight)
        edges = self.edges[self.blocks]
        self.begin, self.phi = edges[:-1], np.repeat(self.mean, edges[1:] - edges[:-1])
        u = self.q * self.phi
        self.free = u > self.least
        self.a = self.cost / np.maximum(u, self.least)
        return self.a

    def newton(self, on: Array, price: Array, spent: Array, budget: Array) -> tuple[Array, float, int]:
        """Newton's step for spent = 1: change of the prices, change of the level, and whether it failed.

        The plan does not depend on the scale of the prices: it is kept by leaving their sum, times budgets, alone.
        """
        n = spent.size
        power, relative = on * (self.a * self.free), on * np.where(self.free, 0.5 / price, 0.0)
        in_block, mean = (_sum_from(x, self.begin, axis=1) for x in (power, relative * self.q))
        mean /= self.weight
        matrix, right = np.zeros((n + 1, n + 1)), np.zeros(n + 1)
        # A price lowers the power of its own rounds, and by way of phi raises that of all rounds in their blocks.
        matrix[:n, :n] = power @ relative.T - in_block @ mean.T
        matrix[:n, n] = in_block @ (_sum_from(self.per_level, self.blocks[:-1]) / (self.weight * self.mean))
        matrix[n, :n] = budget
        right[:n] = spent * (spent - 1) * budget  # of 1 / spent = 1, the more linear equation in the level
        _, _, change, info = dgesv(matrix, right)
        return change[:n], float(change[n]), info

    def weights(self) -> Array:
        """The weights w[S] of the rounds' bounds, not scaled: those for which W = g / phi^2."""
        W = self.g / (self.phi * self.phi)
        W[: self.burn_in] = 0.0
        W[self.burn_in : -1] -= self.r[self.burn_in + 1 :] * W[self.burn_in + 1 :]
        return np.maximum(W, 0.0)


def pool(total: Array, weight: Array) -> tuple[NDArray[np.intp], Array, Array]:
    """Isotonic regression of total / weight: the edges of the blocks of equal values, their weights and values.

    SciPy has one too, but importing scipy.optimize takes longer than a hundred plans.
    """
    blocks = [(-1, 0.0, 0.0, np.nan)]  # not less and not greater than any value
    for first, x, w in zip(range(total.size), total.tolist(), weight.tolist(), strict=True):
        block = (first, x, w, x / w)
        while blocks[-1][3] >= block[3]:
            first, x, w, _ = blocks.pop()
            x, w = x + block[1], w + block[2]
            block = (first, x, w, x / w)
        blocks.append(block)
    firsts, _, weights, values = zip(*blocks[1:], strict=True)
    return np.array([*firsts, total.size]), np.array(weights), np.array(values)
