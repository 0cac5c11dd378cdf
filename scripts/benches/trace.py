"""What a trace costs: a 20-billion-parameter GPT-NeoX on the meta device, and a 24-layer model's second length.

    trace_s, trace_bytes   seconds and peak growth of resident memory of smp.module_graph, the first in its process, for
                           a model of 20 billion parameters (80 GB in float32) of which only shapes exist
    second_length_s        seconds to trace a small 24-layer GPT-NeoX for a second sequence length after a first one

Needs transformers.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import smpar as smp
from benches._common import PeakMemory, finish, parser


def token_ids(samples: int, length: int, vocabulary: int) -> Tensor:
    """Random ids, int64 ``[samples, length]``."""
    return torch.randint(vocabulary, (samples, length))


def trace_seconds(model: nn.Module, ids: Tensor) -> float:
    start = time.perf_counter()
    smp.module_graph(model, input_ids=ids, labels=ids)
    return time.perf_counter() - start


def huge(length: int) -> tuple[float, int]:
    """Seconds and bytes of tracing GPT-NeoX-20B's sizes for one sequence of ``length``."""
    config = GPTNeoXConfig(
        hidden_size=6144, num_hidden_layers=44, num_attention_heads=64, intermediate_size=24576, vocab_size=50432
    )
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(config)
    count = sum(p.numel() for p in model.parameters())
    with PeakMemory() as peak:
        seconds = trace_seconds(model, token_ids(1, length, config.vocab_size))
    print(f"{count / 1e9:.1f} G parameters, length {length}: {seconds:.2f} s, {peak.growth / 1e9:.2f} GB", flush=True)
    return seconds, peak.growth


def second_length(layers: int, first: int, second: int) -> float:
    """Seconds of tracing a model of ``layers`` at a second sequence length."""
    config = GPTNeoXConfig(
        hidden_size=128, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=512, vocab_size=1000
    )
    model = GPTNeoXForCausalLM(config)
    cold = trace_seconds(model, token_ids(2, first, config.vocab_size))
    warm = trace_seconds(model, token_ids(2, second, config.vocab_size))
    print(f"{layers} layers: length {first} {cold:.3f} s, then length {second} {warm:.3f} s", flush=True)
    return warm


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--length", type=int, default=2048, help="sequence length for the huge model")
    args = arguments.parse_args()
    torch.manual_seed(0)
    seconds, grown = huge(args.length)
    figures = {"trace_s": seconds, "trace_bytes": grown, "second_length_s": second_length(24, 64, 80)}
    finish(figures, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
