"""Gold standards: posteriors of posteriordb by the recipe of examples/gold, against their reference draws."""

import json
import sys

import pytest

from ..conftest import FULL, SHARED_DATA
from ..example_tools import FOLDER

pytest.importorskip("numpyro", reason="pip install numpyro")
GOLD = SHARED_DATA / "posteriordb"
NAMES = sorted(path.stem for path in GOLD.glob("*.json"))


@pytest.fixture(scope="module")
def recipe():
    sys.path.insert(0, str(FOLDER / "gold"))
    import recipe

    return recipe


@pytest.mark.skipif(not NAMES, reason="posteriordb is not in ../shared/data")
@pytest.mark.parametrize("name", NAMES)
def test_moments_are_those_of_the_reference_draws(name, recipe):
    if not FULL:
        pytest.skip("time: make test-full samples the gold standards")
    content = json.loads((GOLD / f"{name}.json").read_text())
    for parameter, (mean, spread) in recipe.errors(
        recipe.draw(name.partition("-")[2], content["data"]), content["reference"]
    ).items():
        assert mean <= recipe.MEAN, parameter
        assert spread <= recipe.SPREAD, parameter
