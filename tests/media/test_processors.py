"""What is read from processors of Hugging Face: all that changes a pixel or a sample.

Must not test how it is encoded: see `test_canonical`.
"""

from typing import Any

import numpy as np
import pytest
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from kvkeep.errors import BadInput
from kvkeep.media.canonical import NOT_PIXELS, canonical, processor_parameters


class Processor:
    """Says of itself what it is made with."""

    def __init__(self, **known: Any) -> None:
        self.known = known

    def to_dict(self) -> dict[str, Any]:
        return self.known


def test_a_real_image_processor_is_told_from_one_with_other_settings() -> None:
    """Everything that it computes with is in its parameters; what it is saved as is not."""
    plain = canonical(processor_parameters(SiglipImageProcessorPil()))
    assert plain == canonical(
        processor_parameters(SiglipImageProcessorPil(size=dict[str, Any](width=224.0, height=np.int64(224))))
    )
    saved: Any = SiglipImageProcessorPil()
    saved._processor_class = "SiglipProcessor"
    assert plain == canonical(processor_parameters(saved))
    others: list[dict[str, Any]] = [
        {"size": {"height": 384, "width": 384}}, {"resample": 2}, {"do_rescale": False}, {"do_resize": False},
        {"image_mean": [0.4, 0.5, 0.5]}, {"image_std": [0.4, 0.5, 0.5]}, {"rescale_factor": 1 / 127.5},
        {"do_normalize": False}, {"do_convert_rgb": False},
    ]  # fmt: skip
    encodings = {canonical(processor_parameters(SiglipImageProcessorPil(**other))) for other in others}
    assert len(others) == len(encodings - {plain})


def test_a_real_feature_extractor_is_told_from_one_with_other_settings() -> None:
    """Audio as well."""
    plain, other = WhisperFeatureExtractor(), WhisperFeatureExtractor(sampling_rate=8000)
    assert canonical(processor_parameters(plain)) == canonical(processor_parameters(WhisperFeatureExtractor()))
    assert canonical(processor_parameters(plain)) != canonical(processor_parameters(other))


def test_a_class_that_computes_otherwise_has_other_parameters() -> None:
    """Two backends of one processor give other pixels, whatever they call themselves."""

    class Other(SiglipImageProcessorPil):
        pass

    one, other = processor_parameters(SiglipImageProcessorPil()), processor_parameters(Other())
    assert canonical(one) != canonical(other)
    assert "transformers.models.siglip" in one["computed_by"]


def test_only_what_changes_no_pixel_is_dropped() -> None:
    """From a processor and from those that it is made of; what is not known stays, wherever it stands."""
    part = {"image_processor_type": "X", "size": 1, "new": {"tokenizer": 1}, "chat_template": "a"}
    got = processor_parameters(Processor(image_processor=part, tokenizer="t", processor_class="P", unknown=[1]))
    assert {"image_processor", "unknown", "computed_by", "library_version"} == set(got)
    assert {"image_processor_type": "X", "size": 1, "new": {"tokenizer": 1}} == got["image_processor"]
    kept = processor_parameters(Processor(**dict.fromkeys([*NOT_PIXELS, "device", "image_processor_type"], 1)))
    assert {"device", "image_processor_type", "computed_by", "library_version"} == set(kept)


def test_what_is_no_processor_is_refused() -> None:
    """In one line."""
    with pytest.raises(BadInput, match="dict is not a processor: it must have `to_dict`"):
        processor_parameters({})
