"""Samples against the posterior: marginals over its law, and means and deviations with their errors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from wflmc.evaluation import diagnose
from wflmc.posterior import Gaussian, GaussianPosterior, SoftmaxPosterior
from wflmc.report.parts import (
    COLORS,
    NO_BUTTONS,
    Html,
    axis,
    figure,
    fold,
    grid,
    join,
    missing,
    number,
    paragraph,
    percent,
    table,
    text,
    value,
)
from wflmc.report.run.chains import parameter_name
from wflmc.report.run.verdicts import Verdict, noisy
from wflmc.runs.folder import Draws, Run

Array = NDArray[np.float64]

SHOWN, LISTED, FOLDED = 5, 12, 100
"""Parameters that are drawn, listed, and listed when asked for."""
BINS = 40
LARGEST_HESSIAN = 1500
FAR_OUT = 6.0
"""Quartile ranges beyond the quartiles from which on samples are not drawn."""
CLOSE, FAR, SURE = 0.25, 1.0, 4.0
"""By how much standard deviations may differ, and how many of them means may be off, for samples to resemble the
posterior, and from which on they do not; and |z| from which on a mean is off for sure."""
UNLIKE = 0.1
"""Heights of bars over that of the law that cannot be drawn to one scale."""


class Comparison(NamedTuple):
    """Samples of every parameter, [m], beside the law they should have."""

    mean: Array
    error: Array
    """Standard error of the mean; nan where it is not known."""
    deviation: Array
    law: Gaussian | None

    @property
    def z(self) -> Array:
        """How many standard errors the mean is off; nan where it is not known."""
        if self.law is None:
            return np.full_like(self.mean, np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.error > 0, (self.mean - self.law.mean) / self.error, np.nan)

    @property
    def expected(self) -> Array:
        """Standard deviations of the law; nan where it is not known."""
        law = self.law
        return np.full_like(self.mean, np.nan) if law is None else np.sqrt(np.diagonal(law.covariance))


def posterior_section(run: Run) -> Html:
    """Marginals and a table, with the law where there is one."""
    if run.draws is None:
        why = "the run is not finished" if run.stopped else "trace.nc is missing"
        return missing("There are no samples to compare: {why}.", why=why)
    kind, compared = _kind(run), comparison(run)
    assert compared is not None
    order = _order(compared)
    shown = order[:SHOWN] if len(order) > 2 * SHOWN else order
    tiles = [_marginal(run, run.draws, compared, index) for index in sorted(shown)]
    return join([kind, _in_words(run.draws, compared), grid(tiles, "tiles"), _tables(run, compared, order)])


def _kind(run: Run) -> Html:
    """What law the samples are compared with."""
    if run.rebuilt is None:
        return missing("The posterior is not known here, samples stand alone: {why}", why=run.not_rebuilt)
    posterior = run.rebuilt.inputs.posterior
    if isinstance(posterior, GaussianPosterior):
        return paragraph("Lines are the exact posterior, which this model has in closed form.")
    if posterior.dim > LARGEST_HESSIAN:
        return missing("No law to compare with: the posterior has no closed form, and too many parameters.")
    return paragraph(
        "Lines are the Laplace approximation, a Gaussian at the posterior's mode. The posterior itself has no closed "
        "form and is a little skew, so small differences may be the approximation's."
    )


@lru_cache(maxsize=1)
def comparison(run: Run) -> Comparison | None:
    """Samples beside the law they should have, as far as it is known; None without samples."""
    if run.draws is None:
        return None
    posterior, law = None if run.rebuilt is None else run.rebuilt.inputs.posterior, None
    if isinstance(posterior, GaussianPosterior):
        law = posterior.exact
    elif posterior is not None and posterior.dim <= LARGEST_HESSIAN:
        law = laplace_law(posterior)
    return compare(run.draws, law)


def resembles(run: Run) -> Verdict | None:
    """Whether means and standard deviations are those of the law; where none is known, whether noise is too strong."""
    compared, noise = comparison(run), noisy(run)
    if compared is None or compared.law is None or run.draws is None or not np.all(compared.deviation > 0):
        return noise
    ess = None if run.summary is None else run.summary.ess_min
    doubt = 3 / np.sqrt(2 * (ess or run.draws.theta.shape[0]))  # relative, of a standard deviation
    ratio, off = compared.deviation / compared.expected, np.abs(compared.mean - compared.law.mean) / compared.expected
    unlike, sure = float(np.maximum(ratio, 1 / ratio).max()), np.abs(compared.z) > SURE
    shifted = float(off[sure].max()) if sure.any() else 0.0
    fine, far = ((1 + limit) * (1 + doubt) for limit in (CLOSE, FAR))
    mark = "bad" if unlike > far or shifted > FAR else "note-mark" if unlike > fine or shifted > CLOSE else "good"
    z = np.abs(compared.z[np.isfinite(compared.z)])
    exact = run.rebuilt is not None and isinstance(run.rebuilt.inputs.posterior, GaussianPosterior)
    return Verdict(
        mark,
        text(
            "<b>Do samples resemble the posterior?</b> {word} Their standard deviations are {low} to {high} times "
            "those of the {law}, and their means are up to {off} of them away{z}.{noise}",
            word={"good": "Yes.", "note-mark": "Roughly.", "bad": "No."}[mark],
            low=number(float(ratio.min())),
            high=number(float(ratio.max())),
            law="posterior" if exact else "Laplace approximation",
            off=number(float(off.max()), 2),
            z=f", |z| = {number(float(z.max()), 2)}" if z.size else "",
            noise=""
            if noise is None or "good" in (noise.mark, mark)
            else Html(f" {noise.reason.partition('</b> ')[2]}"),
        ),
    )


def laplace_law(posterior: SoftmaxPosterior) -> Gaussian:
    """The Gaussian at the mode of a softmax posterior with the inverse of the full Hessian there, of the parameters."""
    mode, space = posterior.laplace[0], posterior.coordinates
    rows = posterior.real_rows(posterior.features)
    p = softmax(rows @ mode.reshape(posterior.classes, -1).T, axis=1)
    prior = np.eye(rows.shape[1]) / posterior.prior_std**2 if space is None else np.asarray(space.precision)
    hessian = np.kron(np.eye(posterior.classes), prior).reshape(posterior.classes, rows.shape[1], posterior.classes, -1)
    for one in range(posterior.classes):
        for other in range(posterior.classes):
            weight = p[:, one] * ((one == other) - p[:, other])
            hessian[one, :, other] += rows.T @ (weight[:, None] * rows)
    covariance = np.linalg.inv(hessian.reshape(posterior.dim, posterior.dim))
    moved = posterior.parameters(posterior.parameters(covariance).T).T
    return Gaussian(np.asarray(posterior.parameters(mode)), np.asarray(moved))


def compare(draws: Draws, law: Gaussian | None) -> Comparison:
    """Means with standard errors over chains, which are independent; of one chain, by its effective sample size."""
    theta = draws.theta
    chains = theta.shape[0]
    deviation = theta.reshape(-1, theta.shape[2]).std(0, ddof=1 if chains * theta.shape[1] > 1 else 0)
    if chains > 1:
        error = theta.mean(1).std(0, ddof=1) / np.sqrt(chains)
    else:
        ess = diagnose(theta).ess_min  # the smallest, which errs on the safe side
        error = np.full_like(deviation, np.nan) if not ess else deviation / np.sqrt(ess)
    return Comparison(theta.mean((0, 1)), error, deviation, law)


def _order(compared: Comparison) -> list[int]:
    """Parameters in their order where they are few, else those with the largest |z| first."""
    every = compared.mean.size
    if every <= LISTED or not np.isfinite(compared.z).any():
        return list(range(every))
    return np.argsort(-np.nan_to_num(np.abs(compared.z), nan=-1)).tolist()


def _in_words(draws: Draws, compared: Comparison) -> Html:
    some = "" if draws.every == 1 else f" Of this long trace every {draws.every}th draw was read."
    if compared.law is None:
        return paragraph("{some}", some=some) if some else Html("")
    off = np.abs(compared.mean - compared.law.mean) / compared.expected
    ratio = compared.deviation / compared.expected
    return paragraph(
        "The samples' means are at most {off} posterior standard deviations from where they should be, and their "
        "standard deviations are {low} to {high} times the posterior's.{some}",
        off=value("largest offset", float(off.max()), 2),
        low=number(float(ratio.min())),
        high=number(float(ratio.max())),
        some=some,
    )


def _marginal(run: Run, draws: Draws, compared: Comparison, index: int) -> Html:
    """Histogram of one parameter under its law."""
    values = draws.theta[:, :, index].ravel()
    low, high = _frame(values)
    inside = values[(values >= low) & (values <= high)]
    height, edges = np.histogram(inside, bins=min(BINS, max(8, int(values.size**0.5))), density=True)
    notes = [] if inside.size == values.size else [f"{percent(1 - inside.size / values.size)} of samples lie outside"]
    bars: dict[str, Any] = {
        "type": "bar",
        "x": np.round(0.5 * (edges[1:] + edges[:-1]), 7),
        "y": np.round(height, 6),
        "width": np.diff(edges),
        "name": "samples",
        "marker": {"color": COLORS[0], "opacity": 0.45, "line": {"width": 0}},
    }
    traces, said = [bars], f"Samples of {parameter_name(run, index)}"
    if compared.law is not None:
        mean, spread = float(compared.law.mean[index]), float(compared.expected[index])
        reach = max(4 * spread, float(np.abs(inside - mean).max()))
        x = np.linspace(mean - min(reach, 6 * spread), mean + min(reach, 6 * spread), 121)
        y = np.exp(-0.5 * ((x - mean) / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
        if height.max() < UNLIKE * y.max() or y.max() < UNLIKE * height.max():
            # One of the two would be a line on the ground.
            bars["y"] = np.round(height * y.max() / height.max(), 6)
            notes.append("bars and line have scales of their own")
        traces.append({"x": x, "y": y, "name": "posterior", "mode": "lines", "line": {"color": COLORS[1], "width": 2}})
        z = compared.z[index]
        said = parameter_name(run, index) + (f": z = {z:+.1f}".replace("-", "−") if np.isfinite(z) else "")
    layout = {
        "height": 190,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 30},
        "xaxis": axis("", nticks=4, tickangle=0),
        "yaxis": axis("", showticklabels=False),
        "showlegend": False,
        "bargap": 0,
        "modebar": {"remove": list(NO_BUTTONS)},
    }
    return figure(f"marginal{index}", traces, layout, "; ".join([said, *notes]))


def _frame(values: Array) -> tuple[float, float]:
    """Where bars are drawn: everywhere, or without the far outliers that would make a single bar of the others."""
    first, third = np.percentile(values, [25, 75])
    reach = FAR_OUT * (third - first)
    if reach == 0:
        return float(values.min()), float(values.max())
    return max(float(values.min()), float(first - reach)), min(float(values.max()), float(third + reach))


def _tables(run: Run, compared: Comparison, order: list[int]) -> Html:
    law = "Laplace" if run.rebuilt is not None and hasattr(run.rebuilt.inputs.posterior, "classes") else "posterior"
    head = ("parameter", f"{law} mean", "samples' mean", "z", f"{law} s.d.", "samples' s.d.", "R-hat", "ESS")
    first = [_row(run, compared, index) for index in order[:LISTED]]
    parts: list[object] = [text("<h3>Means and standard deviations</h3>"), grid([table(first, head)], "numbers")]
    rest = order[LISTED : LISTED + FOLDED]
    if rest:
        more = [_row(run, compared, index, diagnosed=False) for index in rest]
        said = f"The next {len(rest)} of {len(order):,} parameters, largest |z| first"
        parts.append(fold(said, grid([table([row[:-2] for row in more], head[:-2])], "numbers")))
    return join(parts)


def _row(run: Run, compared: Comparison, index: int, diagnosed: bool = True) -> list[object]:
    assert run.draws is not None
    law = compared.law
    own = diagnose(run.draws.theta[:, :, index : index + 1]) if diagnosed else None
    error = f" ± {compared.error[index]:.1g}" if np.isfinite(compared.error[index]) else ""
    z = compared.z[index]
    return [
        parameter_name(run, index),
        "–" if law is None else value(f"law.mean.{index}", float(law.mean[index]), 4),
        join([value(f"mean.{index}", float(compared.mean[index]), 4), error]),
        f"{z:+.1f}" if np.isfinite(z) else "–",
        "–" if law is None else value(f"law.sd.{index}", float(compared.expected[index]), 3),
        value(f"sd.{index}", float(compared.deviation[index]), 3),
        number(None if own is None else own.rhat_max, 4),
        "–" if own is None or own.ess_min is None else f"{own.ess_min:,.0f}",
    ]
