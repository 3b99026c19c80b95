"""What is counted of encoder outputs, and its exposition."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.encoder import EncoderCache
from kvkeep.errors import BadInput
from kvkeep.service import KVCacheService
from kvkeep.telemetry.prometheus import exposition
from kvkeep.telemetry.snapshot import CacheKey
from tests.encoder.test_encoder import Encoder, digest, make_cache, put


@pytest.mark.asyncio
async def test_outputs_are_counted_and_told() -> None:
    cache = make_cache()
    async with KVCacheService() as service:
        service.add(CacheKey("n"), cache)
        assert service.snapshot()[0].outputs is None
        encoder = EncoderCache(cache, b"fp")
        put(encoder, 1, Encoder((1500,)))  # a page and a slot
        put(encoder, 2, Encoder((100,)))
        held = [encoder.get(digest(1)) for _ in range(2)]
        assert encoder.get(digest(3)) is None
        with pytest.raises(BadInput, match="gives"):
            encoder.get_or_compute(digest(1), Encoder((9,)), expect=(((8,), "float32"),))
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(exposition(service.snapshot()).decode())
            for sample in family.samples
            if "output" in sample.name or "slotted" in sample.name
        }
        for output in held:
            assert output is not None
            output.release()
    told = {name[0].removeprefix("kvkeep_"): value for name, value in found.items() if len(name) < 5}
    by_label = {(name[0].removeprefix("kvkeep_"), name[-1]): value for name, value in found.items()}
    assert by_label["output_lookups_total", "gpu"] == 2
    assert by_label["output_lookups_total", "miss"] == 3
    assert by_label["output_lookups_total", "mismatch"] == 1
    assert by_label["outputs", "gpu"] == 2
    assert told["stored_outputs_total"] == 2
    assert told["output_bytes"] == 6000 + 400
    assert told["held_outputs"] == 2
    assert told["slotted_pages"] == 1
