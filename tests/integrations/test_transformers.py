"""KvkeepCache: what `generate` gives with it, what the model computes, what is refused.

Must not know how pages are found.  The model is a small LlamaForCausalLM with seeded weights; positions that it
computes are counted where token ids become embeddings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

from kvkeep.engine.loader import find_model
from kvkeep.errors import BadInput
from kvkeep.integrations.transformers import KvkeepCache, check_version

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
CPU_GIB = 0.02

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return small_llama()


def small_llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(11)
    config = LlamaConfig(**SIZES, **more, eos_token_id=None, bos_token_id=None)
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


@contextmanager
def computed(model: LlamaForCausalLM) -> Iterator[list[int]]:
    """Positions that each forward computes."""
    counts: list[int] = []

    def count(module: object, args: object, output: torch.Tensor) -> None:
        counts.append(output.shape[1])

    hook = model.get_input_embeddings().register_forward_hook(count)
    yield counts
    hook.remove()


def answer(model: LlamaForCausalLM, ids: torch.Tensor, kept: KvkeepCache | None = None, new: int = 6) -> torch.Tensor:
    output: torch.Tensor = model.generate(ids, past_key_values=kept, max_new_tokens=new, do_sample=False)
    return output


def test_ten_turns_give_the_same_tokens_and_prefill_only_what_is_new(model: LlamaForCausalLM) -> None:
    """Each turn's tokens are those without a cache; turns 2 to 10 compute their new tokens and the last one sampled."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB) as kept, computed(model) as counts:
        ids = tokens(37, seed=0)
        for turn in range(10):
            without = answer(model, ids)
            counts.clear()
            ids_after = answer(model, ids, kept)
            assert torch.equal(without, ids_after)
            assert ([37] if turn == 0 else [9 + 1]) + [1] * 5 == counts
            ids = torch.cat([ids_after, tokens(9, seed=turn + 1)], dim=1)
        kept._kept.check_invariants()


def test_sessions_in_turns_come_back_to_their_full_pages(model: LlamaForCausalLM) -> None:
    """Sessions that take turns compute what is new and less than a page more, in a pool that holds one of them."""
    with KvkeepCache(model, gpu_tokens=224, cpu_gib=CPU_GIB, page_size=16) as kept, computed(model) as counts:
        sessions = [tokens(40 + i, seed=i) for i in range(4)]
        for turn in range(6):
            for i, ids in enumerate(sessions):
                without = answer(model, ids)
                counts.clear()
                after = answer(model, ids, kept)
                assert torch.equal(without, after)
                if turn:
                    held = ids.shape[1] - 9 - 1  # all but the new ones, and the last sampled
                    assert held // 16 * 16 == kept.matched_len
                    assert ids.shape[1] - held // 16 * 16 == counts[0]
                sessions[i] = torch.cat([after, tokens(9, seed=100 * turn + i)], dim=1)
        assert kept.stats().matched_host_tokens > 0
        kept._kept.check_invariants()


def test_a_chat_that_grows_sends_other_sessions_down(model: LlamaForCausalLM) -> None:
    """A long turn of the live chat takes pages of another session only once they have been copied to host memory."""
    with KvkeepCache(model, gpu_tokens=224, cpu_gib=CPU_GIB, page_size=16) as kept:
        other = tokens(80, seed=1)
        want = answer(model, other, kept)
        chat = torch.cat([answer(model, tokens(40, seed=2), kept), tokens(150, seed=3)], dim=1)
        assert torch.equal(answer(model, chat), answer(model, chat, kept))
        assert 45 == kept.matched_len
        assert torch.equal(want, answer(model, other, kept))
        assert 64 == kept.matched_len and 0 == kept.stats().pages_lost
        kept._kept.check_invariants()


def test_only_what_matches_is_handed_over(model: LlamaForCausalLM) -> None:
    """A prompt that differs at one token inside a page gets the pages before it, and the tokens of a model alone."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB, page_size=16) as kept:
        first = tokens(80, seed=5)
        answer(model, first, kept)
        for at in (0, 15, 16, 17, 47, 79):
            other = first.clone()
            other[0, at] = (other[0, at] + 1) % VOCABULARY
            assert torch.equal(answer(model, other), answer(model, other, kept))
            assert at // 16 * 16 == kept.matched_len


def test_the_same_prompt_again_computes_its_last_token(model: LlamaForCausalLM) -> None:
    """At least one token is computed, also where the prompt ends with a page."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB, page_size=16) as kept, computed(model) as counts:
        ids = tokens(64, seed=6)
        want = answer(model, ids)
        for matched in (0, 48, 48):
            counts.clear()
            assert torch.equal(want, answer(model, ids, kept))
            assert [64 - matched, *[1] * 5] == counts
        counts.clear()
        prefix = want[:, :69]  # the very positions that the live sequence holds
        assert torch.equal(answer(model, prefix), answer(model, prefix, kept))
        assert 64 == kept.matched_len


def test_logits_are_those_of_a_dynamic_cache_on_the_same_schedule(model: LlamaForCausalLM) -> None:
    """Forwards over kept pages give the bits that they give over transformers' own cache."""
    parts = [tokens(n, seed=n) for n in (33, 1, 18, 1)]
    own = DynamicCache(config=model.config)
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB) as kept, torch.no_grad():
        for part in parts:
            want = model(part, past_key_values=own, use_cache=True).logits
            assert torch.equal(want, model(part, past_key_values=kept, use_cache=True).logits)
        whole = torch.cat(parts, dim=1)
        kept.reset()
        kept.forget()
        model(whole, past_key_values=kept, use_cache=True)
        assert 0 == kept.matched_len


def test_logits_after_a_hit_are_those_of_the_whole_prompt(model: LlamaForCausalLM) -> None:
    """`generate` after a hit gives each token's logits as it does over the whole prompt: positions are right."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB, page_size=16) as kept:
        ids = tokens(90, seed=3)
        answer(model, ids[:, :70], kept)
        logits = []
        for cache in (None, kept):
            output = model.generate(
                ids, past_key_values=cache, max_new_tokens=4, do_sample=False, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            logits.append(torch.cat(output.logits))
        assert 64 == kept.matched_len
        assert torch.allclose(logits[0], logits[1], atol=1e-5)


def test_pages_come_back_from_host_memory_as_they_were(model: LlamaForCausalLM) -> None:
    """K and V that left the pool and came back are the bits that were computed."""
    with KvkeepCache(model, gpu_tokens=96, cpu_gib=CPU_GIB, page_size=16) as kept, torch.no_grad():
        first, others = tokens(65, seed=1), [tokens(80, seed=i) for i in (2, 3, 4)]
        want = model(first, past_key_values=kept, position_ids=torch.arange(65)[None]).logits[0, -1]
        before = kv_of_live(kept, 64)
        for other in others:
            answer(model, other, kept)
        got = model(first, past_key_values=kept, position_ids=torch.arange(65)[None]).logits
        assert 64 == kept.matched_len == 65 - got.shape[1]
        assert kept.stats().matched_host_tokens >= 64
        assert torch.equal(before, kv_of_live(kept, 64))
        assert torch.allclose(want, got[0, -1], atol=1e-5)


def kv_of_live(kept: KvkeepCache, count: int) -> torch.Tensor:
    assert kept._live is not None
    return kept._pool.kv[list(kept._live.pages[: count // 16])].clone()


def test_sampling_is_the_same_too(model: LlamaForCausalLM) -> None:
    """With the same seed the same tokens are sampled."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=0) as kept:
        ids = tokens(40, seed=8)
        for _ in range(3):
            outputs = []
            for cache in (None, kept):
                torch.manual_seed(3)
                outputs.append(model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=True))
            assert torch.equal(*outputs)
            ids = torch.cat([outputs[0], tokens(5, seed=9)], dim=1)


def test_salts_share_nothing(model: LlamaForCausalLM) -> None:
    """A cache matches what another of the same salt would, and `forget` forgets all of it."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=0, salt=b"a") as kept:
        ids = tokens(50, seed=1)
        answer(model, ids, kept)
        kept._salt = b"b"
        answer(model, ids, kept)
        assert 0 == kept.matched_len
        kept.forget()
        answer(model, ids, kept)
        assert 0 == kept.matched_len


def test_changed_weights_forget_what_was_computed(model: LlamaForCausalLM) -> None:
    """After a step of training nothing that the old weights gave is used, and the output is the new weights'."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB) as kept:
        ids = tokens(50, seed=1)
        longer = torch.cat([answer(model, ids, kept), tokens(3, seed=2)], dim=1)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        assert torch.equal(answer(model, longer), answer(model, longer, kept))
        assert 0 == kept.matched_len
        answer(model, longer, kept)
        assert kept.matched_len > 0


def test_a_forward_that_fails_leaves_nothing_behind(model: LlamaForCausalLM) -> None:
    """What a forward had begun to write is not used by the next prompt."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB, page_size=16) as kept:
        ids = tokens(70, seed=4)
        want = answer(model, ids)

        def fail(module: object, args: object) -> None:
            raise RuntimeError("no memory")

        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            answer(model, ids, kept)
        hook.remove()
        assert 0 == kept.get_seq_length()
        assert torch.equal(want, answer(model, ids, kept))
        assert 0 == kept.matched_len
        kept._kept.check_invariants()


def test_an_interrupted_call_does_not_mislead_the_next(model: LlamaForCausalLM) -> None:
    """After an interrupt in the middle of decoding, the next call is right, or says that it must be made again."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB, page_size=16) as kept:
        calls = 0

        def interrupt(module: object, args: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise KeyboardInterrupt

        hook = model.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            answer(model, tokens(70, seed=4), kept)
        hook.remove()
        other = tokens(90, seed=5)
        with pytest.raises(BadInput, match="interrupted inside a forward: what it began is dropped, call again"):
            answer(model, other, kept)
        assert torch.equal(answer(model, other), answer(model, other, kept))
        assert torch.equal(answer(model, tokens(70, seed=4)), answer(model, tokens(70, seed=4), kept))
        assert 64 == kept.matched_len
        kept._kept.check_invariants()


def test_other_caches_of_the_same_model_are_left_alone(model: LlamaForCausalLM) -> None:
    """Calls without the cache, between calls with it, change nothing; after `close` the model has no hooks of it."""
    kept = KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB)
    ids = tokens(40, seed=1)
    first = answer(model, ids, kept)
    answer(model, tokens(30, seed=2))
    longer = torch.cat([first, tokens(4, seed=3)], dim=1)
    assert torch.equal(answer(model, longer), answer(model, longer, kept))
    assert 45 == kept.matched_len
    kept.close()
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_a_prompt_in_chunks_is_the_same(model: LlamaForCausalLM) -> None:
    """`prefill_chunk_size` gives the same tokens, first and again."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB) as kept:
        ids = tokens(100, seed=1)
        want = answer(model, ids)
        for _ in range(2):
            got = model.generate(ids, past_key_values=kept, max_new_tokens=6, do_sample=False, prefill_chunk_size=32)
            assert torch.equal(want, got)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"input_ids": torch.ones(2, 9, dtype=torch.long)}, r"\[2, 9\].*one sequence"),
        ({"input_ids": torch.ones(1, 9, dtype=torch.long), "num_beams": 2}, "one sequence"),
        ({"input_ids": torch.ones(1, 9, dtype=torch.long), "num_return_sequences": 2, "do_sample": True}, "one sequ"),
        (
            {
                "input_ids": torch.ones(1, 3, dtype=torch.long),
                "attention_mask": torch.tensor([[0, 1, 1]]),
            },
            "attention_mask leaves positions out",
        ),
        ({"inputs_embeds": torch.ones(1, 3, 32)}, "embeddings have no ids"),
    ],
)
def test_what_cannot_be_named_is_refused(model: LlamaForCausalLM, arguments: dict[str, object], words: str) -> None:
    """Batches, beams, padding and embeddings are refused with a line that says so, and the cache works on."""
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB) as kept:
        with pytest.raises(BadInput, match=words):
            model.generate(**arguments, past_key_values=kept, max_new_tokens=3)
        ids = tokens(20, seed=1)
        assert torch.equal(answer(model, ids), answer(model, ids, kept))


def test_other_tensors_and_training_are_refused(model: LlamaForCausalLM) -> None:
    """Inputs that K and V may depend on, gradients, training mode and positions out of order are refused."""
    ids = tokens(9, seed=1)
    with KvkeepCache(model, gpu_tokens=512, cpu_gib=CPU_GIB) as kept:
        with pytest.raises(BadInput, match="labels is a tensor"):
            model(input_ids=ids, labels=ids, past_key_values=kept)
        with pytest.raises(BadInput, match="records gradients"):
            model(input_ids=ids, past_key_values=kept)
        with torch.no_grad():
            with pytest.raises(BadInput, match="begin at 5, and no sequence is there"):
                model(input_ids=ids, past_key_values=kept, position_ids=torch.arange(5, 14)[None])
            model(input_ids=ids, past_key_values=kept)
            with pytest.raises(BadInput, match="begin at 5: 0 begins a prompt, 9 goes on"):
                model(input_ids=ids, past_key_values=kept, position_ids=torch.arange(5, 14)[None])
            with pytest.raises(BadInput, match="do not follow each other"):
                model(input_ids=ids, past_key_values=kept, position_ids=torch.zeros(1, 9, dtype=torch.long))
            with pytest.raises(BadInput, match="the very model that it was made with"):
                small_llama()(input_ids=ids, past_key_values=kept)
            model.train()
            with pytest.raises(BadInput, match=r"model\.eval\(\)"):
                model(input_ids=ids, past_key_values=kept, position_ids=torch.arange(9)[None])


def test_models_that_it_cannot_serve_are_refused_at_once() -> None:
    """Sliding windows, latent attention, rotary embeddings that move and training mode: a line at the start."""
    torch.manual_seed(1)
    sliding = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).eval()
    with pytest.raises(BadInput, match="mistral has layers of DynamicSlidingWindowLayer: full attention"):
        KvkeepCache(sliding)
    latent = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4},
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            qk_nope_head_dim=8,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=3,
        )
    ).eval()
    with pytest.raises(BadInput, match="latent attention"):
        KvkeepCache(latent)
    moving = small_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(BadInput, match="dynamic rotary embeddings"):
        KvkeepCache(moving)
    with pytest.raises(BadInput, match="training mode"):
        KvkeepCache(small_llama().train())
    with pytest.raises(BadInput, match=r"must be a transformers\.PreTrainedModel"):
        KvkeepCache(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    adapted = small_llama()
    adapted.model.layers[0].active_adapter = "a"
    with pytest.raises(BadInput, match="adapters"):
        KvkeepCache(adapted)


def test_sizes_are_checked_at_the_start(model: LlamaForCausalLM) -> None:
    """A tier that is smaller than one sequence is refused with the size that would do; so is a sequence too long."""
    with pytest.raises(BadInput, match=r"cpu_gib=1e-05 holds \d+ tokens.*may fill the pool's 512: use 0\.000\d+ or"):
        KvkeepCache(model, gpu_tokens=512, cpu_gib=1e-5)
    with pytest.raises(BadInput, match="cpu_gib is -1"):
        KvkeepCache(model, cpu_gib=-1)
    with pytest.raises(BadInput, match="gpu_tokens is 0"):
        KvkeepCache(model, gpu_tokens=0)
    with KvkeepCache(model, gpu_tokens=64, cpu_gib=CPU_GIB) as kept:
        with pytest.raises(BadInput, match="prompt of 100 tokens needs 7 pages, the pool has 4"):
            answer(model, tokens(100, seed=1), kept)
        with pytest.raises(BadInput, match="sequence of 65 tokens and a pool of 64: make the cache with a larger"):
            answer(model, tokens(60, seed=1), kept, new=10)
        assert torch.equal(answer(model, tokens(40, seed=2)), answer(model, tokens(40, seed=2), kept))
        kept._kept.check_invariants()


def test_versions() -> None:
    """Releases whose caches are not known are refused by number."""
    check_version("5.24.0")
    check_version("5.0.0")
    for version in ("4.57.6", "6.0.0"):
        with pytest.raises(BadInput, match=f"transformers {version}: kvkeep knows"):
            check_version(version)


@pytest.mark.slow
def test_smollm2_over_ten_turns() -> None:
    """A real model's ten turns give the tokens that they give without, and compute the new ones only."""
    try:
        file = find_model("smollm2-135m")
    except BadInput as missing:
        pytest.skip(str(missing))
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name).eval()
    model.generation_config.eos_token_id = None
    with KvkeepCache(model, gpu_tokens=1024, cpu_gib=1) as kept, computed(model) as counts:
        ids = torch.randint(0, 40000, (1, 120), generator=torch.Generator().manual_seed(0))
        for turn in range(10):
            without = answer(model, ids, new=12)
            counts.clear()
            ids_after = answer(model, ids, kept, new=12)
            assert torch.equal(without, ids_after)
            assert (120 if turn == 0 else 20 + 1) == counts[0]
            more = torch.randint(0, 40000, (1, 20), generator=torch.Generator().manual_seed(turn + 1))
            ids = torch.cat([ids_after, more], dim=1)
