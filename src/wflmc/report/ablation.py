"""What each ingredient buys, as tables to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wflmc.studies import Row

AT = 30.0
"""The SNR of the first table, in dB."""


def ablation(tables: Mapping[str, Sequence[Row]]) -> str:
    """Two tables in Markdown: figure 6's setting at 30 dB, ingredient after ingredient; figure 8's at 20 dB without."""
    law = [row for row in tables["beyond_w2"] if row.x == AT]
    lines = [
        "# What each ingredient buys",
        "",
        f"Figure 6's setting at {AT:g} dB: W2², worst after burn-in, by the exact law (mean over channels) and from",
        "chains with clipping on the first channel, and the exact effective sample size of one chain.",
        "",
        "| scheme | W2² by the law | W2² of clipped chains | ESS |",
        "|---|---|---|---|",
    ]
    for row in law:
        cells = [_cell(tables, name, row) for name in ("beyond_w2", "beyond_chains", "beyond_ess")]
        lines.append(f"| {row.scheme} | {' | '.join(cells)} |")
    lines += [
        "",
        "Figure 8's setting at 20 dB, means over experiments. Ours hides one image, which is how the paper's text",
        "defines neighbours; the paper's recipe clips whole devices and hides them. Whitening is by statistics of the",
        "images that are taken as public, but where it is paid for.",
        "",
        "| recipe | accuracy | ECE | NLL | ε spent (replace) |",
        "|---|---|---|---|---|",
    ]
    names = ("beyond_ablation_accuracy", "beyond_ablation", "beyond_ablation_nll", "beyond_ablation_epsilon")
    for row in tables["beyond_ablation"]:
        lines.append(f"| {row.scheme} | {' | '.join(_cell(tables, name, row) for name in names)} |")
    return "\n".join([*lines, ""])


def _cell(tables: Mapping[str, Sequence[Row]], table: str, like: Row) -> str:
    (found,) = (row for row in tables[table] if (row.scheme, row.x) == (like.scheme, like.x))
    if found.y is None:
        return "–"
    sure = found.y_se is None or found.y_se < 1e-6 * abs(found.y)
    return f"{found.y:.3g}" if sure else f"{found.y:.3g} ± {found.y_se:.1g}"
