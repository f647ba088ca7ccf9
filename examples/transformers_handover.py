"""A second embedding: two plain Python processes with Hugging Face models, no serving engine.

    pip install torch transformers
    python examples/transformers_handover.py

The prefill process runs a small Llama with random weights over a prompt and keeps its cache as two
tensor-parallel ranks would: one KV head each, in pages of 16 tokens, token before head. The decode process has
the same weights and one rank: pages of 24 tokens, head before token. It fetches the cache of all tokens but the
last and continues from there. Its tokens must equal those of a process that did everything itself, and must
differ if one block of the cache is wrong.
"""

import subprocess
import sys

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvferry import Agent, Contact, Engine, EventKind, GroupSpec, GroupSteps, Model

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.4,  # large weights, so that attention decides
    dtype="float32",
)
HEADS, HEAD_SIZE = CONFIG.num_key_value_heads, CONFIG.hidden_size // CONFIG.num_attention_heads
PROMPT = [(7 * i * i + 3 * i + 11) % CONFIG.vocab_size for i in range(70)]
LOADED = len(PROMPT) - 1  # the decode process computes the last token itself
NEW_TOKENS = 16
THEIRS, OURS = [9, 2, 7, 4, 11], [3, 5, 1]  # blocks of 16 and of 24 tokens
RANKS = 2


def random_model() -> LlamaForCausalLM:
    """The same weights in every process."""
    torch.manual_seed(20260101)
    return LlamaForCausalLM(CONFIG).eval()


def cache_model() -> Model:
    """The cache's description for kvferry, from the model's own configuration."""
    return Model.from_config(CONFIG.to_dict() | {"torch_dtype": "float32"})


@torch.inference_mode()
def decode_greedily(model: LlamaForCausalLM, tokens: list[int], cache: DynamicCache) -> list[int]:
    """Runs `tokens` after the tokens of the cache, and then one token at a time."""
    found: list[int] = []
    step = torch.tensor([tokens])
    while len(found) < NEW_TOKENS:
        logits = model(step, past_key_values=cache, use_cache=True).logits
        found.append(int(logits[0, -1].argmax()))
        step = torch.tensor([[found[-1]]])
    return found


@torch.inference_mode()
def prefill() -> None:
    engine = Engine(cache_model(), GroupSpec(12, 16, "L|BPNH"), name="prefill", tp_size=RANKS)
    cache = DynamicCache()
    random_model()(torch.tensor([PROMPT]), past_key_values=cache, use_cache=True)
    agents = [Agent(engine, rank) for rank in range(RANKS)]
    for rank, agent in enumerate(agents):
        heads = slice(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)
        pages = [torch.zeros(12, 2, 16, HEADS // RANKS, HEAD_SIZE) for _ in cache.layers]
        for layer, page in zip(cache.layers, pages, strict=True):
            for part, values in enumerate((layer.keys, layer.values)):  # [1, head, token, element]
                for token in range(LOADED):
                    page[THEIRS[token // 16], part, token % 16] = values[0, heads, token]
        agent.register(pages)  # torch tensors, by __dlpack__: not copied
        agent.hold("request", [GroupSteps(THEIRS, 0, LOADED)])
    agents[0].introduce(agents[1].introduction)
    print(*(value for value in vars(agents[0].contact).values() if value), flush=True)
    for agent in agents:
        event = agent.wait_event(timeout=120)
        print(event.kind.name if event else "nothing", flush=True)
        agent.close()


def cache_of(pages: list[torch.Tensor]) -> DynamicCache:
    """The cache that transformers wants, from the pages [block, K or V, head, token, element]."""
    cache = DynamicCache()
    for layer, page in enumerate(pages):
        sequence = torch.cat([page[block] for block in OURS], dim=2)[:, :, :LOADED]
        cache.update(sequence[0][None].clone(), sequence[1][None].clone(), layer)
    return cache


def fetch(contact: Contact) -> list[torch.Tensor]:
    engine = Engine(cache_model(), GroupSpec(8, 24, "L|BPHN"), name="decode")
    pages = [torch.zeros(8, 2, HEADS, 24, HEAD_SIZE) for _ in range(CONFIG.num_hidden_layers)]
    with Agent(engine, verify=True) as agent:
        agent.register(pages)
        agent.pull("request", contact, [GroupSteps(OURS, 0, LOADED)])
        event = agent.wait_event(timeout=120)
        if event is None or event.kind is not EventKind.DONE:
            raise SystemExit(f"the request failed: {event and event.detail}")
        print(f"{event.bytes} bytes in {event.runs} runs")
    return pages


def main() -> None:
    model = random_model()
    alone = decode_greedily(model, PROMPT, DynamicCache())
    with subprocess.Popen([sys.executable, __file__, "prefill"], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        pages = fetch(Contact(*other.stdout.readline().split()))
        assert other.stdout.read().split() == ["DONE"] * RANKS
    handed_over = decode_greedily(model, PROMPT[-1:], cache_of(pages))
    print("alone:      ", *alone)
    print("handed over:", *handed_over)
    if handed_over != alone:
        raise SystemExit("the tokens differ")

    # Equal tokens prove something only if a wrong cache gives different ones. Here one block of one layer has
    # each token's V beside its neighbour's K.
    pages[1][OURS[1], 1] = pages[1][OURS[1], 1].roll(1, dims=1)
    wrong = decode_greedily(model, PROMPT[-1:], cache_of(pages))
    print("one block wrong:", *wrong)
    if wrong == alone:
        raise SystemExit("a wrong cache gave the same tokens")


if __name__ == "__main__":
    prefill() if sys.argv[1:] == ["prefill"] else main()
