"""The mean of a prior, from labelled rows that are public.

The same model is fitted to the public rows: θ₀ is the mode of its posterior there, under
the prior N(0, prior_std² I). The private data then have the prior N(θ₀, prior_std² I).
Privacy does not charge for it, as no private record is looked at.
"""

from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.data.images import image_features
from wflmc.data.sets import DATA_SETS, Features
from wflmc.posterior import gaussian_regression, softmax_regression
from wflmc.posterior.inputs import Names
from wflmc.posterior.regression import Regression
from wflmc.scenario.files import is_data_path, label_kind, load_data
from wflmc.scenario.schema import PosteriorSection
from wflmc.support.errors import InputError

PRIOR_FROM = "prior_from"
PUBLIC_ROWS = "the path of an .npz or .csv file with labelled public rows"


def load_public_rows(section: PosteriorSection, columns: Sequence[str]) -> Features:
    """Return the labelled rows that the prior is fitted to, as their file has them.

    Columns of a CSV are brought into the order of the data's, where both have names.

    Args:
        section: with `prior_from`, which names the file.
        columns: the names of the data's features; empty where they have none.

    Returns:
        Features and labels, not whitened.

    Raises:
        InputError: for a file that cannot be read, or has other columns.
    """
    path = section.prior_from
    if not is_data_path(path):
        raise InputError(PRIOR_FROM, path, PUBLIC_ROWS)
    try:
        public, names = load_data(path, label_kind(section))
    except InputError as error:
        raise _about_public_rows(error) from None
    if not (names and columns) or names == tuple(columns):
        return public
    if sorted(names) != sorted(columns):
        missing = [name for name in columns if name not in names]
        added = [name for name in names if name not in columns]
        problem = f"the column {added[0]!r}" if added else f"no column {missing[0]!r}"
        requirement = f"a file with the columns of posterior.data; it has {problem}"
        raise InputError(PRIOR_FROM, path, requirement)
    order = [names.index(name) for name in columns]
    return public._replace(X=public.X[:, order])


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
    return image_features(
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
    try:
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
    except InputError as error:
        raise _about_public_rows(error) from None
    return model.mode


def _about_public_rows(error: InputError) -> InputError:
    """Return an error about data as one about the public rows."""
    return InputError(PRIOR_FROM, error.value, error.requirement)
