"""The data of figures: what is fetched before they are computed."""

import pytest

from wflmc.apps.studies import reproduction
from wflmc.data.sets import Location


@pytest.mark.parametrize(
    ("figures", "fetched"),
    [
        (["fig8"], []),
        (["fig5"], []),
        (["league"], ["mnist", "fashion-mnist", "rendered-digits"]),
        (["fig8", "league"], ["mnist", "fashion-mnist", "rendered-digits"]),
    ],
)
def test_a_folder_of_mnist_is_not_for_the_league(
    figures, fetched, monkeypatch, tmp_path
):
    names = []
    monkeypatch.delenv(reproduction.VARIABLE, raising=False)
    monkeypatch.setattr(
        reproduction, "find", lambda name: Location(tmp_path, ["a file"])
    )
    monkeypatch.setattr(reproduction, "fetch", lambda name, report: names.append(name))
    monkeypatch.setattr(reproduction, "load", lambda name, folder: None)
    monkeypatch.setattr(reproduction, "mnist_features", lambda images, generator: None)
    reproduction.read_data([tmp_path], figures, lambda text: None)
    assert names == fetched
