"""The bit gate with images: it passes on the real thing, and fails on mistakes of the multimodal path."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvkeep import cli
from tests.cli.conftest import Run

pytest.importorskip("torch")
if find_spec("skimage") is None or find_spec("PIL") is None:
    pytest.skip("needs Pillow, and the photographs of scikit-image", allow_module_level=True)

from kvkeep.encoder import EncoderCache, EncoderOutput
from kvkeep.engine.request import ImageInput
from kvkeep.engine.verify import image_faults
from kvkeep.engine.vision.features import ImageFeatures
from kvkeep.index.media import MediaItem
from kvkeep.index.names import TokenIds

SHORT = ("verify", "--multimodal", "--page-size", "48")
FIXED = 120  # requests of the fixed scenarios, for each model


@pytest.mark.slow
def test_the_gate_passes_on_the_real_thing(kvkeep: Run, tmp_path: Path):
    """Over all scenarios nothing differs, every planted fault is noticed, and what the scenarios are for happened."""
    done = kvkeep(*SHORT, "--cases", str(FIXED + 30), "--json", "out.json")
    assert (0, "") == (done.returncode, done.stderr), done.stdout
    assert "weights from a seed: none that learnt can be had offline" in done.stdout
    got = json.loads((tmp_path / "out.json").read_text())
    value = {name: metric["value"] for name, metric in got["metrics"].items()}
    assert got["ok"] and 1 == value["strict"]
    assert "verify --multimodal" == got["command"]
    assert (0, 0, 0) == (value["mismatches"], value["wrong_matches"], value["untested"])
    assert (8, 8) == (value["faults_planted"], value["faults_noticed"])
    assert value["cases"] == len(got["rows"]) >= 2 * FIXED
    assert value["cases_llava"] >= FIXED and value["cases_gemma3"] >= FIXED
    counted = ("host_hit_pages", "suspensions", "hole_tokens", "failed_copies", "lost_tokens", "pages_evicted")
    looks = ("images_encoded", "features_found", "features_from_host")
    assert all(value[name] > 0 for name in counted + looks), {name: value[name] for name in counted}
    assert any(row["images"] and row["matched_tokens"] and not row["encoded"] for row in got["rows"])


def look_up_the_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder cache answers about whichever image was asked for first."""
    right, first = EncoderCache.get_or_compute, list[bytes]()

    def get(cache: EncoderCache, key: bytes, compute: Callable[[], object]) -> EncoderOutput:
        first.append(key)
        return right(cache, first[0], compute)

    monkeypatch.setattr(EncoderCache, "get_or_compute", get)


def forget_the_image_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is not told what stands behind placeholders."""
    right = ImageFeatures.media

    def media(features: ImageFeatures, images: Sequence[ImageInput], ids: TokenIds) -> tuple[MediaItem, ...]:
        return tuple(replace(item, digest=b"an image, anyone") for item in right(features, images, ids))

    monkeypatch.setattr(ImageFeatures, "media", media)


def name_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images without identity: exact, and of no use."""
    right = ImageFeatures.media

    def media(features: ImageFeatures, images: Sequence[ImageInput], ids: TokenIds) -> tuple[MediaItem, ...]:
        return tuple(replace(item, digest=None) for item in right(features, images, ids))

    monkeypatch.setattr(ImageFeatures, "media", media)


@pytest.mark.parametrize(
    "plant",
    [
        look_up_the_first_image,
        pytest.param(forget_the_image_in_the_name, marks=pytest.mark.slow),
        pytest.param(name_nothing, marks=pytest.mark.slow),
    ],
)
def test_the_gate_fails_on_a_wrong_image(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_thread: None
):
    """Features or pages of another image, and a cache that finds none, end in exit code 1."""
    plant(monkeypatch)
    assert 1 == cli.main([*SHORT, "--cases", "26", "--json", str(tmp_path / "out.json")])
    got = json.loads((tmp_path / "out.json").read_text())
    value = {name: metric["value"] for name, metric in got["metrics"].items()}
    assert not got["ok"] and 0 == value["strict"]
    assert value["mismatches"] + value["wrong_matches"] > 0
    assert (plant is name_nothing) == (value["mismatches"] == 0)


def test_a_planted_fault_that_is_not_noticed_fails_the_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
):
    """A gate that would not see a fault says so, and does not pass."""
    monkeypatch.setattr(image_faults, "FAULTS", (image_faults.Fault("none at all", "same image"),))
    assert 1 == cli.main([*SHORT, "--cases", "6"])
    assert "gemma3, planted and not noticed: none at all" in capsys.readouterr().out
