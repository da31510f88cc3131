"""On a real card: kernels against float64, and the engine's tokens with and without
graphs and planning ahead. Run by `make gpu-check`, with Triton's interpreter off."""

from __future__ import annotations

import pytest
import torch

from pagedattn.device.cuda import missing

WHY = missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no card: {WHY}")

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_kernel_is_near_float64(dtype: torch.dtype) -> None:
    from pagedattn.kernels import gpu

    from pagedattn.bench.gpu_kernels import TO_CHECK, check, problems

    with torch.inference_mode():
        checks = [check(gpu, p) for p in problems(TO_CHECK, "cuda", dtype)]
    assert not [c for c in checks if not c.passed]


def tokens(model: object, planning_ahead: bool, **changes: object) -> list[list[int]]:
    """What a few requests get from an engine with these settings."""
    from pagedattn.kernels import gpu

    from pagedattn.assembly import on_card
    from pagedattn.bench.gpu import bare_engine
    from pagedattn.config import EngineArgs
    from pagedattn.device.cuda import Cuda
    from pagedattn.engine import Engine
    from pagedattn.pipeline import PipelinedEngine
    from pagedattn.request import SamplingParams

    args = EngineArgs(
        num_gpu_blocks_override=200,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        **changes,
    )
    card = Cuda()
    parts = on_card(args, model, gpu, card, card.memory()[0])
    kind = PipelinedEngine if planning_ahead else Engine
    engine = bare_engine(kind, model, parts)
    for i in range(6):
        params = SamplingParams(temperature=i % 2, seed=i, max_tokens=30)
        engine.add_request(f"r{i}", list(range(5, 40 + i)), params)
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = list(output.outputs[0].token_ids)
    engine.check()
    return [last[name] for name in sorted(last)]


def test_graphs_and_planning_ahead_change_no_token() -> None:
    from pagedattn.kernels import gpu

    from pagedattn.bench.gpu import random_model
    from pagedattn.model.loader import Placement

    torch.manual_seed(0)
    placement = Placement(torch.device("cuda"), torch.float32)
    with torch.inference_mode():
        model = random_model(TINY, gpu, placement, 256)
    expected = tokens(model, False, enforce_eager=True)
    assert all(len(row) == 30 for row in expected)
    assert tokens(model, True, enforce_eager=True) == expected
    sizes = dict(cudagraph_capture_sizes=[1, 2, 4, 8, 16])
    for mode in ("FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL"):
        found = tokens(model, True, cudagraph_mode=mode, **sizes)
        assert found == expected, mode
