"""A language model of 6.7 billion parameters with random weights, by the transformers library: 4 texts of 4 096 tokens are read and
continued, again and again: what is said, and the
times of a prefill and of a token.

torch_llm.py ROUNDS TOKENS
"""

import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from places import held, report

PROMPT, TEXTS = 4096, 4


def main():
    rounds, tokens = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
        max_position_embeddings=8192, attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    length = PROMPT + tokens
    cache = StaticCache(config=config, max_cache_len=length)
    prompt = torch.randint(0, 32000, (TEXTS, PROMPT), device="cuda")
    prefill, decode, texts, ended = [], [], [], []
    # What is chosen by default for a cache adds up in another order each time.
    with torch.inference_mode(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        for _ in range(rounds):
            cache.reset()
            torch.cuda.synchronize()
            since = time.perf_counter()
            answer = model(prompt, past_key_values=cache, cache_position=torch.arange(PROMPT, device="cuda"), logits_to_keep=1)
            word = answer.logits[:, -1].argmax(-1, keepdim=True)
            said = [word.tolist()]
            prefill.append((time.perf_counter() - since) * 1e3)
            ended.append(time.time())
            for at in range(PROMPT, length - 1):
                since = time.perf_counter()
                answer = model(word, past_key_values=cache, cache_position=torch.tensor([at], device="cuda"))
                word = answer.logits[:, -1].argmax(-1, keepdim=True)
                said.append(word.tolist())
                decode.append((time.perf_counter() - since) * 1e3)
            texts.append(said)
    for text in texts:
        print(text)
    peak = torch.cuda.max_memory_allocated()
    report(milliseconds=prefill, ended=ended, decode=decode, peak=peak, reserved=torch.cuda.max_memory_reserved(), held=held())


main()
