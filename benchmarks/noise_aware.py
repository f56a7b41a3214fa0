"""Noise-aware posteriors beside chains, in the setting of figure 6: python -m
benchmarks.noise_aware [laws chains …].

Five parameters, 30 devices, Rayleigh fading of power 0.01, ℓ = 30, δ = 0.01, adjacency
`replace` for whole devices. `today` are plans for the chain (50 + 50 rounds, step
0.4/(μ + L)); `transcript` are plans with `policy.objective = "transcript"` (10 + 10
rounds from zero, steps 0.8/(μ + L) and 0.4/(μ + L)). H is known.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import wflmc
from wflmc.evaluation import estimate_w2_sq, exact_ess, exact_w2_sq, simulated_coverage
from wflmc.posterior import Gaussian, GaussianPosterior, pool, w2_squared

Array = NDArray[np.float64]

EPSILONS, SNRS = (1.0, 2.0, 4.0, 8.0, 15.0), (30.0, 20.0)
CHANNELS, CHAINS, DATA_SETS = 10, 400, 500
CLIPS = (60.0, 90.0, 120.0, 180.0)
"""Clipping thresholds of the rival's one release, of which it has the best."""
COUNTS = ((3, 1), (4, 1), (4, 2), (6, 2), (8, 2), (8, 4), (10, 5), (10, 10), (20, 20))
"""Rounds of burn-in and kept ones, from few to many."""


def setting() -> GaussianPosterior:
    """Return the posterior of figure 6, with synthetic data."""
    return wflmc.gaussian_regression(jax.random.key(0), devices=30, partition="blocks")


def plans(
    posterior: GaussianPosterior,
    snr_db: float,
    epsilon: float,
    transcript: bool,
    counts: tuple[int, int] | None = None,
) -> list[wflmc.Plan]:
    """Return one plan for each channel."""
    burn_in, samples = counts or ((10, 10) if transcript else (50, 50))
    steps = np.repeat([0.8 if transcript else 0.4, 0.4], [burn_in, samples]) / (
        posterior.mu + posterior.L
    )
    privacy = wflmc.Privacy(epsilon=epsilon, delta=0.01, clip=30)
    links = [
        wflmc.Link(wflmc.channel.rayleigh(0.01), snr_db, seed=seed)
        for seed in range(CHANNELS)
    ]
    how: dict[str, Any] = {}
    if transcript:
        how = {
            "sampler": wflmc.Sampler(init="zero"),
            "policy": wflmc.Policy(objective="transcript"),
        }
    return wflmc.plan_many(
        posterior,
        links,
        privacy,
        step_size=steps,
        burn_in=burn_in,
        samples=samples,
        **how,
    )


def law_distances(
    posterior: GaussianPosterior, plan: wflmc.Plan, first: int
) -> tuple[float, Gaussian, Gaussian]:
    """Return by exact laws, without clipping: E W2² of one transcript, and the laws of
    all draws and of matched ones.

    Args:
        first: the first round that is used.
    """
    information = plan.gain**2 / (plan.noise_power * plan.scale**2)
    V = 1 / information[first:].sum()
    weight = information[first:] * V @ plan.weight[first:] - 1
    prior, hessian = np.eye(5), posterior.hessian.sum(0)
    gram, one = hessian - prior, np.eye(5)
    pulled = np.linalg.solve((1 + weight @ weight / 30) * gram + V * one, gram)
    covariance = np.linalg.inv(prior + gram @ pulled)
    matrix = covariance @ pulled.T
    # Silent devices count with their gradient at the posterior's mean.
    off = weight @ (posterior.linear - posterior.hessian @ posterior.mean)
    mean, moved = matrix @ (posterior.linear.sum(0) + off), V * matrix @ matrix.T
    apart = w2_squared(Gaussian(mean, covariance), posterior.exact) + np.trace(moved)
    inverse = np.linalg.inv(hessian)
    matched = Gaussian(inverse @ (posterior.linear.sum(0) + off), inverse)
    return (
        float(apart),
        Gaussian(mean, covariance + moved),
        matched if np.linalg.eigvalsh(hessian)[0] > V else None,
    )


def stacked(laws: list[Gaussian]) -> Gaussian:
    """Return the first two moments of all laws together."""
    return pool(Gaussian(*map(np.stack, zip(*laws, strict=True))))


def laws(posterior: GaussianPosterior) -> Table:
    """Return W2² by the exact laws, while nothing is clipped, mean over channels."""
    table = Table(
        title="W2² without clipping, by exact laws; chain: 100 rounds, worst kept round, and its ESS"
    )
    for name in (
        "SNR",
        "ε",
        "plan",
        "chain",
        "ESS",
        "one transcript",
        "ratio",
        "pooled",
        "ratio",
        "matched",
    ):
        table.add_column(name, justify="right")
    for snr_db in SNRS:
        for epsilon in EPSILONS:
            today = plans(posterior, snr_db, epsilon, transcript=False)
            chain = float(
                np.mean([exact_w2_sq(posterior, plan)[50:].max() for plan in today])
            )
            ess = np.mean([exact_ess(posterior, plan).min() for plan in today])
            for name in ("today", "transcript"):
                some = (
                    today
                    if name == "today"
                    else plans(posterior, snr_db, epsilon, transcript=True)
                )
                found = [
                    law_distances(
                        posterior, plan, 0 if name == "today" else plan.burn_in
                    )
                    for plan in some
                ]
                one = float(np.mean([each[0] for each in found]))
                together = float(
                    w2_squared(stacked([each[1] for each in found]), posterior.exact)
                )
                matched = [each[2] for each in found if each[2] is not None]
                exact = (
                    f"{float(w2_squared(stacked(matched), posterior.exact)):.2g}"
                    if len(matched) == len(found)
                    else "–"
                )
                cells = (
                    f"{chain:.3g}",
                    f"{ess:.2g} of 50",
                    f"{one:.3g}",
                    f"{chain / one:.2f}",
                )
                table.add_row(
                    f"{snr_db:g}",
                    f"{epsilon:g}",
                    name,
                    *cells,
                    f"{together:.3g}",
                    f"{chain / together:.2f}",
                    exact,
                )
    return table


def own_distance(theta: Array, exact: Gaussian) -> float:
    """Return the mean over chains of W2² of one chain's draws, as a Gaussian, to the
    posterior.
    """
    draws = theta.shape[1]
    away = theta - theta.mean(1, keepdims=True)
    return float(
        w2_squared(
            Gaussian(theta.mean(1), away.swapaxes(1, 2) @ away / (draws - 1)), exact
        ).mean()
    )


def transcript_distances(
    posterior: GaussianPosterior, trace: wflmc.Trace
) -> tuple[float, float]:
    """Return E W2² of one transcript, and W2² of the draws of all transcripts."""
    made = wflmc.noise_aware(trace, posterior, draws=1)
    one = float(
        w2_squared(Gaussian(made.mean, made.covariance), posterior.exact).mean()
    )
    return one, float(estimate_w2_sq(made.draws, posterior.exact, resamples=2).worst)


def sampled(
    posterior: GaussianPosterior, some: list[wflmc.Plan], chains: int = CHAINS
) -> wflmc.Trace:
    """Return clipped chains over the channels."""
    return wflmc.sample(
        jax.random.key(0),
        posterior,
        [some[i % len(some)] for i in range(chains)],
        transcript=True,
    )


def chains(posterior: GaussianPosterior) -> Table:
    """Return W2² from clipped chains."""
    table = Table(title=f"W2² from {CHAINS} clipped chains over {CHANNELS} channels")
    for name in (
        "SNR",
        "ε",
        "plan",
        "chain, pooled",
        "own draws",
        "one transcript",
        "pooled",
        "ratio to pooled chain",
    ):
        table.add_column(name, justify="right")
    for snr_db in SNRS:
        for epsilon in EPSILONS:
            first = sampled(
                posterior, plans(posterior, snr_db, epsilon, transcript=False)
            )
            worst = estimate_w2_sq(first.theta, posterior.exact, resamples=2).worst
            own = own_distance(np.asarray(first.theta, float), posterior.exact)
            for name in ("today", "transcript"):
                trace = (
                    first
                    if name == "today"
                    else sampled(
                        posterior, plans(posterior, snr_db, epsilon, transcript=True)
                    )
                )
                one, together = transcript_distances(posterior, trace)
                ratios = f"{worst / one:.2f}, pooled {worst / together:.2f}"
                cells = (
                    f"{worst:.3g}",
                    f"{own:.3g}",
                    f"{one:.3g}",
                    f"{together:.3g}",
                    ratios,
                )
                table.add_row(f"{snr_db:g}", f"{epsilon:g}", name, *cells)
    return table


def coverage(posterior: GaussianPosterior, data_sets: int = DATA_SETS) -> Table:
    """Return what intervals hold over simulated data sets, and their widths over the
    posterior's.
    """
    table = Table(
        title=f"Intervals over {data_sets} simulated data sets; widths over the posterior's"
    )
    for name in (
        "SNR",
        "ε",
        "plan",
        "chain 90 %",
        "50 %",
        "width",
        "noise-aware 90 %",
        "50 %",
        "s.e.",
        "width",
        "bias",
    ):
        table.add_column(name, justify="right")
    for snr_db in SNRS:
        for epsilon in EPSILONS:
            for name in ("today", "transcript"):
                some = plans(
                    posterior, snr_db, epsilon, transcript=name == "transcript"
                )
                found = simulated_coverage(
                    jax.random.key(5), posterior, some, data_sets
                )
                shares = [
                    f"{100 * share:.1f}" for share in (*found.chain, *found.noise_aware)
                ]
                left = (
                    f"{snr_db:g}",
                    f"{epsilon:g}",
                    name,
                    *shares[:2],
                    f"{found.chain_width[0]:.2f}",
                    *shares[2:],
                )
                error = f"{100 * found.error[0]:.1f}, {100 * found.error[1]:.1f}"
                table.add_row(
                    *left,
                    error,
                    f"{found.noise_aware_width[0]:.2f}",
                    f"{np.median(found.result.bias):.2f}",
                )
    return table


def rounds(posterior: GaussianPosterior) -> Table:
    """Return the fewest rounds whose one transcript is as near as chains of 100 rounds:
    all pooled, or one of them.
    """
    table = Table(
        title="The fewest rounds (burn-in + kept) whose one transcript is as near as chains of 100 rounds, 30 dB"
    )
    for name in (
        "ε",
        "all chains' W2²",
        "rounds",
        "transcript's W2²",
        "one chain's W2²",
        "rounds",
        "transcript's W2²",
    ):
        table.add_column(name, justify="right")
    for epsilon in EPSILONS:
        first = sampled(posterior, plans(posterior, 30.0, epsilon, transcript=False))
        worst = estimate_w2_sq(first.theta, posterior.exact, resamples=2).worst
        targets = worst, own_distance(np.asarray(first.theta, float), posterior.exact)
        found: list[tuple[str, str]] = [("none of these", "–")] * 2
        for counts in reversed(COUNTS):
            one, _ = transcript_distances(
                posterior,
                sampled(posterior, plans(posterior, 30.0, epsilon, True, counts), 200),
            )
            for index, target in enumerate(targets):
                if one <= target:
                    found[index] = (f"{counts[0]} + {counts[1]}", f"{one:.3g}")
        table.add_row(
            f"{epsilon:g}", f"{worst:.3g}", *found[0], f"{targets[1]:.3g}", *found[1]
        )
    return table


def draw(posterior: GaussianPosterior, path: str, data_sets: int = DATA_SETS) -> None:
    """Draw coverage and width of 90 % intervals against ε, at 30 dB."""
    import matplotlib.pyplot as plt

    found = {
        name: [
            simulated_coverage(
                jax.random.key(5),
                posterior,
                plans(posterior, 30.0, epsilon, name == "transcript"),
                data_sets,
            )
            for epsilon in EPSILONS
        ]
        for name in ("today", "transcript")
    }
    curves = {
        "the chain's own intervals, 100 rounds": [
            (one.chain, one.chain_width) for one in found["today"]
        ],
        "noise-aware, the same 100 rounds": [
            (one.noise_aware, one.noise_aware_width) for one in found["today"]
        ],
        "noise-aware, 20 rounds planned for it": [
            (one.noise_aware, one.noise_aware_width) for one in found["transcript"]
        ],
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for (name, rows), marker in zip(curves.items(), "osD", strict=True):
        left.plot(
            EPSILONS,
            [100 * float(share[0]) for share, _ in rows],
            marker=marker,
            label=name,
        )
        right.plot(EPSILONS, [float(width[0]) for _, width in rows], marker=marker)
    left.axhspan(88, 92, color="0.9", zorder=0)
    left.set(
        xscale="log",
        xlabel="ε (replace, a whole device)",
        ylabel="90 % intervals hold, %",
        ylim=(70, 100),
    )
    right.set(
        xscale="log",
        yscale="log",
        xlabel="ε (replace, a whole device)",
        ylabel="width over the posterior's",
    )
    for axis in (left, right):
        axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axis.minorticks_off()
    right.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def rival(posterior: GaussianPosterior, data_sets: int = DATA_SETS) -> Table:
    """Return one release of b = Σ v u, clipped by device, with a noise-aware posterior,
    at the same ε, power and uses.

    The noise of the release is that of the gradients of today's plans (all rounds) with
    another clipping threshold. H is known to both.
    """
    table = Table(
        title="One release of Σ v u with a noise-aware posterior, and transcripts, 30 dB; in posterior deviations"
    )
    for name in (
        "ε",
        "release: clip",
        "90 % holds",
        "width",
        "RMSE",
        "transcript: 90 % holds",
        "width",
        "RMSE",
    ):
        table.add_column(name, justify="right")
    hessian = posterior.hessian.sum(0)
    deviation = np.sqrt(np.diagonal(np.linalg.inv(hessian)))
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((data_sets, 5))
    outcome = np.einsum("knm,dm->dkn", posterior.features, truth) + rng.standard_normal(
        (data_sets, 30, 40)
    )
    sums = np.einsum("knm,dkn->dkm", posterior.features, outcome)
    gram, one = hessian - np.eye(5), np.eye(5)
    for epsilon in EPSILONS:
        (plan, *_) = plans(posterior, 30.0, epsilon, transcript=False)
        V = 1 / np.sum(plan.gain**2 / (plan.noise_power * plan.scale**2))
        best: tuple[float, ...] = (np.inf,) * 4
        for clip in CLIPS:
            length = np.linalg.norm(sums, axis=-1, keepdims=True)
            noise = V * (clip / 30) ** 2
            heard = (sums * np.minimum(1, clip / length)).sum(1) + np.sqrt(
                noise
            ) * rng.standard_normal((data_sets, 5))
            pulled = np.linalg.solve(gram + noise * one, gram)
            covariance = np.linalg.inv(one + gram @ pulled)
            error, spread = (
                heard @ (covariance @ pulled.T).T - truth,
                np.sqrt(np.diagonal(covariance)),
            )
            found = float(np.sqrt(np.mean((error / deviation) ** 2)))
            share = float(np.mean(np.abs(error) < 1.6449 * spread))
            best = min(best, (found, clip, share, float(np.mean(spread / deviation))))
        result = simulated_coverage(
            jax.random.key(5),
            posterior,
            plans(posterior, 30.0, epsilon, True),
            data_sets,
        )
        ours = np.sqrt(np.mean(((result.result.mean - result.truth) / deviation) ** 2))
        mine = (
            f"{100 * result.noise_aware[0]:.1f}",
            f"{result.noise_aware_width[0]:.2f}",
            f"{ours:.2f}",
        )
        theirs = (
            f"{best[1]:g}",
            f"{100 * best[2]:.1f}",
            f"{best[3]:.2f}",
            f"{best[0]:.2f}",
        )
        table.add_row(f"{epsilon:g}", *theirs, *mine)
    return table


def unknown(posterior: GaussianPosterior, data_sets: int = 300) -> Table:
    """Return what intervals hold if of G only N I is known, with the deviations of N
    Gaussian features.
    """
    table = Table(
        title=f"Public moments G = N I, uncertain by √N, 30 dB, {data_sets} simulated data sets"
    )
    for name in ("ε", "noise-aware 90 %", "50 %", "s.e.", "width"):
        table.add_column(name, justify="right")
    deviation = np.sqrt(1200) * (1 + (2**0.5 - 1) * np.eye(5))
    moments = wflmc.Moments(1200 * np.eye(5), np.eye(5), 1200, deviation)
    for epsilon in EPSILONS:
        some = plans(posterior, 30.0, epsilon, transcript=True)
        found = simulated_coverage(
            jax.random.key(5), posterior, some, data_sets, moments
        )
        cells = [f"{100 * share:.1f}" for share in found.noise_aware]
        error = f"{100 * found.error[0]:.1f}, {100 * found.error[1]:.1f}"
        table.add_row(
            f"{epsilon:g}", *cells, error, f"{found.noise_aware_width[0]:.2f}"
        )
    return table


STUDIES = {
    "unknown": unknown,
    "laws": laws,
    "chains": chains,
    "coverage": coverage,
    "rounds": rounds,
    "rival": rival,
}


def main() -> None:
    """Print the tables that are asked for, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", help="which tables")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw coverage and widths into this file instead"
    )
    options, posterior = parser.parse_args(), setting()
    if options.plot:
        draw(posterior, options.plot)
        return
    for name in options.studies or STUDIES:
        Console(width=150).print(STUDIES[name](posterior))


if __name__ == "__main__":
    main()
