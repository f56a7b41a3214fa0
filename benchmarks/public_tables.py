"""Private fits of small tables with and without public rows, and with misleading ones.

    python -m benchmarks.public_tables [SPLITS] [TABLE …] [--jobs J] [--scores FILE]

Every table is split SPLITS times (20): a quarter of the rows is for tests, and a tenth
of the others is public in one arm and left out in all others, so that all arms fit the
same private rows. The arms:

- without: no public rows;
- public: the tenth as it is;
- shifted: the tenth as another laboratory would have it. Every column is multiplied by
  a factor between 1/2 and 2 (log-uniform) and moved by half a standard deviation up or
  down, and a fifth of the labels is replaced by another label at random;
- public alone, shifted alone: the mean of the prior by itself, without private rows.

ε is per record (adjacency: replace) at δ = 1e-5; all that is paid for is within it. The
rare table is noise with 3 % of one class, as of `benchmarks.tables`; its ratio is that
of the mean probability of this class to its share of the private rows.
"""

import argparse
import json
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TABLES = ("breast_cancer", "digits", "rare")
EPSILONS = (1.0, 0.3)
ARMS = ("without", "public", "shifted")
DELTA = 1e-5
FLIPPED_FRACTION = 0.2
"""Labels of a shifted copy that are replaced."""
LARGEST_FACTOR = 2.0
"""By which a column of a shifted copy is larger or smaller, at most."""
Array = NDArray[np.float64]
Labels = NDArray[np.intp]
Scores = dict[str, float]


class Rows(NamedTuple):
    """Features and labels."""

    X: Array
    y: Labels


class Split(NamedTuple):
    """A table, split."""

    private: Rows
    public: Rows
    test: Rows


def load(name: str, split: int) -> Rows:
    """Return a table by its name; the rare one is new for every split."""
    from sklearn import datasets

    if name != "rare":
        return Rows(*getattr(datasets, f"load_{name}")(return_X_y=True))
    generator = np.random.default_rng(split)
    X = generator.standard_normal((20_000, 8))
    return Rows(X, (generator.random(len(X)) < 0.03).astype(np.intp))


def split_table(name: str, split: int) -> Split:
    """Return private rows, a tenth of as many public ones, and rows for tests."""
    from sklearn.model_selection import train_test_split

    table = load(name, split)
    X, X_test, y, y_test = train_test_split(
        *table, test_size=0.25, random_state=split, stratify=table.y
    )
    X, X_public, y, y_public = train_test_split(
        X, y, test_size=0.1, random_state=split, stratify=y
    )
    return Split(Rows(X, y), Rows(X_public, y_public), Rows(X_test, y_test))


def shifted(rows: Rows, classes: int, split: int) -> Rows:
    """Return rows in other units, with some labels replaced."""
    generator = np.random.default_rng([split, 1])
    features = rows.X.shape[1]
    factor = LARGEST_FACTOR ** generator.uniform(-1, 1, features)
    moved_by = 0.5 * rows.X.std(0) * generator.choice([-1, 1], features)
    other = (rows.y + generator.integers(1, classes, len(rows.y))) % classes
    is_flipped = generator.random(len(rows.y)) < FLIPPED_FRACTION
    return Rows(rows.X * factor + moved_by, np.where(is_flipped, other, rows.y))


def scores_of(probabilities: Array, split: Split) -> Scores:
    """Return the scores of predictions for the test rows."""
    from wflmc.evaluation.scores import calibration

    p = np.maximum(probabilities, 1e-12)
    p /= p.sum(1, keepdims=True)
    found = calibration(p, split.test.y)
    share = np.mean(split.private.y == 1)
    return {
        "accuracy": float(found.accuracy),
        "nll": float(found.nll),
        "ece": float(found.ece),
        "ratio": float(p[:, 1].mean() / share),
    }


def measure(name: str, epsilon: float, number: int) -> dict[str, Scores]:
    """Return the scores of all arms on one split."""
    import wflmc
    from wflmc.apps.tables.model import FittedModel

    warnings.simplefilter("ignore")
    split = split_table(name, number)
    classes = int(split.private.y.max()) + 1
    copies = {
        "without": None,
        "public": split.public,
        "shifted": shifted(split.public, classes, number),
    }
    scores: dict[str, Scores] = {}
    for arm in ARMS:
        rows = copies[arm]
        model = wflmc.PrivateClassifier(
            epsilon,
            DELTA,
            classes=classes,
            public=None if rows is None else tuple(rows),
            random_state=number,
        ).fit(*split.private)
        settings = model.settings_
        scores[arm] = scores_of(model.predict_proba(split.test.X), split)
        scores[arm]["epsilon"] = model.privacy_.epsilon
        scores[arm] |= {key: float(value) for key, value in vars(settings).items()}
        public = model.facts_.public
        if public is not None:
            scores[arm]["prior_distance"] = float(model.prior_distance_)
            scores[arm]["prior_width"] = settings.prior_std / public.prior_std(
                len(split.private.y), 0.1
            )
            alone = FittedModel(
                theta=public.prior_mean[None],
                scaling=public.feature_scaling,
                classes=classes,
            )
            predicted = alone.probabilities(split.test.X)
            scores[f"{arm} alone"] = scores_of(predicted, split)
    return scores


def with_error(values: Array) -> str:
    """Return a mean with its standard error."""
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{values.mean():.4f} ± {error:.4f}"


def show(name: str, epsilon: float, measured: list[dict[str, Scores]]) -> None:
    """Print the means of all arms, and how much worse than without public rows."""
    print(f"{name}, ε = {epsilon:g}, {len(measured)} splits")
    for arm in measured[0]:
        columns = []
        for key in ("accuracy", "nll", "ece", "ratio"):
            values = np.array([scores[arm][key] for scores in measured])
            columns.append(f"{key} {with_error(values)}")
        losses = [scores[arm]["nll"] - scores["without"]["nll"] for scores in measured]
        columns.append(f"nll − that without {with_error(np.array(losses))}")
        print(f"  {arm:14}", "; ".join(columns))
    for arm in ARMS[1:]:
        widths = [scores[arm]["prior_width"] for scores in measured]
        distances = [scores[arm]["prior_distance"] for scores in measured]
        shown = (
            f"{np.mean(widths):.2f}; distance from its mean {np.mean(distances):.2f}"
        )
        print(f"  {arm:14} width of the prior over its floor {shown}", flush=True)


def main(arguments: list[str]) -> None:
    """Measure all tables at all ε."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public_tables")
    parser.add_argument("splits", nargs="?", type=int, default=20)
    parser.add_argument("tables", nargs="*", default=TABLES)
    parser.add_argument("--epsilon", nargs="*", type=float, default=EPSILONS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--scores", type=Path)
    options = parser.parse_intermixed_args(arguments)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    cases = list(product(options.tables, options.epsilon))
    written: dict[str, list[dict[str, Scores]]] = {}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        pending = {
            case: [
                pool.submit(measure, *case, number) for number in range(options.splits)
            ]
            for case in cases
        }
        for (name, epsilon), jobs in pending.items():
            measured = [job.result() for job in jobs]
            show(name, epsilon, measured)
            written[f"{name}, {epsilon:g}"] = measured
            if options.scores is not None:
                options.scores.write_text(json.dumps(written))


if __name__ == "__main__":
    main(sys.argv[1:])
