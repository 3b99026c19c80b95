"""M*'s engine, with the prefixes of ended requests kept: a session of two turns over a toy node, on a CPU.

    python -m examples.mstar_adapter                 from the checkout, in an environment with mstar-ai 0.2.1

`make test-mstar` makes such an environment: .venv-mstar.
"""

from importlib.util import find_spec


def main() -> None:
    if find_spec("mstar") is None:
        raise SystemExit("M* is not installed here: `make test-mstar` makes an environment that has it, .venv-mstar")
    from examples.mstar_toy import make_engine, request_info, step
    from kvkeep.integrations.mstar import KeptReqConfig, Prompt, attach

    engine = make_engine(pages=64)
    (kept,) = attach(engine, nodes=("LLM",), cpu_tier_gib=0.01)  # after load_model, before the first request

    conversation = [7 * i % 97 for i in range(140)]
    for turn in range(2):
        rid = f"turn {turn}"
        engine.add_request(rid, {"kv": KeptReqConfig(prompts={"main": Prompt(conversation)})})
        while not engine.check_ready("LLM", rid, request_info(rid)).ready:
            pass  # M*'s scheduler runs something else meanwhile
        hidden, error = step(engine, rid, conversation)
        if hidden is None:
            raise SystemExit(f"no room: {error}")
        print(f"{rid}: computed {len(hidden)} of {len(conversation)} prompt tokens")
        for token in (11, 12, 13, 14, 15):
            step(engine, rid, [token], walk="decode")
            conversation.append(token)
        engine.remove_request(rid)
        conversation += [21, 22, 23, 24, 25, 26, 27, 28]
    print(f"matched {kept.counts.matched_tokens} of {kept.counts.prompt_tokens} prompt tokens")
    kept.close()


if __name__ == "__main__":
    main()
