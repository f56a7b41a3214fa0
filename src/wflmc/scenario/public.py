"""Rows that are public: what whitens features, and what the mean of a prior is fitted to.

For the prior, the same model is fitted to labelled public rows: θ₀ is the mode of its
posterior there, under the prior N(0, prior_std² I). The private data then have the prior
N(θ₀, prior_std² I). Privacy does not charge for any of this, as no private record is
looked at.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.data.images import (
    Whitening,
    public_image_features,
    public_whitening,
)
from wflmc.data.sets import DATA_SETS, Features
from wflmc.posterior import gaussian_regression, softmax_regression
from wflmc.posterior.inputs import Names, check_prior_mean
from wflmc.posterior.regression import Regression
from wflmc.scenario.files import (
    column_order,
    is_data_path,
    label_kind,
    load_data,
    load_features,
)
from wflmc.scenario.schema import PosteriorSection
from wflmc.support.errors import Fault, InputError, renamed_keys

PRIOR_FROM = "prior_from"
WHITEN_FROM = "whiten_from"
PUBLIC_ROWS = "the path of an .npz or .csv file with public rows"
LABELLED_ROWS = "the path of an .npz or .csv file with labelled public rows"


def check_public_files(section: PosteriorSection) -> None:
    """Refuse the file of the private data, or a copy of it, as one of public rows.

    Args:
        section: whose `whiten_from` and `prior_from` name files.

    Raises:
        InputError: names the key and the file.
    """
    if not is_data_path(section.data):
        return
    named = [(WHITEN_FROM, source) for source in section.whitening_sources]
    named.append((PRIOR_FROM, section.prior_from))
    for key, source in named:
        if source and _is_same_file(Path(section.data), Path(source)):
            requirement = "another file than posterior.data, whose rows are private"
            raise InputError(key, source, requirement)


def _is_same_file(first: Path, second: Path) -> bool:
    """Return whether two paths lead to one file, or to files of equal content."""
    if not (first.is_file() and second.is_file()):
        return False
    if os.path.samefile(first, second):
        return True
    has_same_size = first.stat().st_size == second.stat().st_size
    return has_same_size and first.read_bytes() == second.read_bytes()


def whitening_of_files(
    section: PosteriorSection, columns: Sequence[str], width: int
) -> Whitening:
    """Return the whitening by the rows of one or more files, which need no labels.

    Args:
        section: with `whiten_from`.
        columns: the names of the data's features; empty where they have none.
        width: the number of the data's features.

    Raises:
        InputError: for a file that cannot be read, or has other columns.
    """
    row_sets = []
    for path in section.whitening_sources:
        if not is_data_path(path):
            raise InputError(WHITEN_FROM, path, PUBLIC_ROWS)
        with renamed_keys({"data": WHITEN_FROM}):
            row_sets.append(load_features(path, columns, width))
    return public_whitening(*row_sets, ridge=section.whiten_ridge)


def load_public_rows(
    section: PosteriorSection, columns: Sequence[str], width: int
) -> Features:
    """Return the labelled rows that the prior is fitted to, as their file has them.

    Columns of a CSV are brought into the order of the data's, where both have names.

    Args:
        section: with `prior_from`, which names the file.
        columns: the names of the data's features; empty where they have none.
        width: the number of the data's features.

    Returns:
        Features and labels, not whitened.

    Raises:
        InputError: for a file that cannot be read, or has other columns.
    """
    path = section.prior_from
    if not is_data_path(path):
        raise InputError(PRIOR_FROM, path, LABELLED_ROWS)
    with renamed_keys({"data": PRIOR_FROM}):
        public, names = load_data(path, label_kind(section))
        if names and columns:
            order = column_order(path, names, columns)
            public = public._replace(X=public.X[:, order])
    if public.X.shape[1] != width:
        problem = Fault(f"has {public.X.shape[1]} features")
        requirement = f"labelled rows of {width} features, as the data have"
        raise InputError(PRIOR_FROM, problem, requirement)
    return public


def load_public_images(section: PosteriorSection) -> Features:
    """Return the features of the labelled images that the prior is fitted to.

    Args:
        section: whose `prior_from` names another data set than `data`; whitened as the
            private images are.

    Raises:
        InputError: for the private data set itself, or one that does not exist.
    """
    name = section.prior_from
    public_sets = [public for public in DATA_SETS if public != section.data]
    if name not in public_sets:
        requirement = f"another data set: {', '.join(public_sets)}"
        raise InputError(PRIOR_FROM, name, requirement)
    return public_image_features(
        name,
        section.whitening_sources,
        section.whiten_ridge,
        section.intercept,
    )


def fit_prior_mean(
    section: PosteriorSection, public: Features, names: Names
) -> NDArray[np.float64]:
    """Return θ₀[m], the mode of the model on public rows.

    Args:
        section: whose model, `prior_std` and intercept count.
        public: features and labels, in the coordinates of the private features.
        names: the labels of all classes; empty for a regression.

    Raises:
        InputError: for rows of other classes, or that no model can be fitted to.
    """
    # One device holds all rows, so that no key has any effect.
    key = jax.random.key(0)
    model: Regression
    with renamed_keys({"data": PRIOR_FROM, "prior_mean": PRIOR_FROM}):
        if names:
            model = softmax_regression(
                key,
                1,
                X=public.X,
                y=public.y,
                classes=names,
                intercept=section.adds_ones,
                prior_std=section.prior_std,
            )
        else:
            model = gaussian_regression(
                key,
                1,
                X=public.X,
                y=public.y,
                intercept=section.adds_ones,
                prior_std=section.prior_std,
            )
        mode = model.mode
        checked = check_prior_mean(mode, mode.size)
    assert checked is not None  # a mode is no missing mean
    return checked
