"""The picture of what clipping the examples one by one buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wflmc.report.figures import save_figure
from wflmc.studies import Row

LINES: dict[str, dict[str, Any]] = {
    "device, paper": {
        "color": "#0072B2",
        "marker": "s",
        "linestyle": "--",
        "label": "a device, the paper's accountant",
    },
    "device, exact": {"color": "#D55E00", "marker": "o", "linestyle": "-", "label": "a device, exact accountant"},
    "record, exact": {"color": "#009E73", "marker": "^", "linestyle": "-.", "label": "one example, clipped to 9"},
}


def draw_record(tables: Mapping[str, Sequence[Row]], about: str, path: Path) -> list[Path]:
    """Budget and distance against ε, one line for each of what is hidden; returns the files written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    figure.suptitle(f"What hiding one example instead of a device buys\n{about}", fontsize=10)
    for axes, name, label in zip(
        figure.subplots(1, 2),
        ("record_budget", "record"),
        ("budget for Σ 2(αℓ)²/N0", "exact W2², worst after burn-in"),
        strict=True,
    ):
        for scheme, style in LINES.items():
            own = [row for row in tables[name] if row.scheme == scheme]
            spread = None if own[0].y_se is None else [row.y_se for row in own]
            axes.errorbar([row.x for row in own], [row.y for row in own], spread, markersize=4, **style)
        axes.set(yscale="log", xlabel="ε (δ = 0.01, replace)", ylabel=label)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, title="what is hidden", title_fontsize=8)
    return save_figure(figure, path)
