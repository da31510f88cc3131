"""A tiny model in a folder, and a live server for it in a thread: what tests talk to.

The model has random weights and one token per byte, so that any text can be forced
with logit_bias and every character of several bytes is split over tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagedattn.async_engine import AsyncEngine
from pagedattn.config import EngineArgs
from pagedattn.serve.app import build_app
from pagedattn.serve.front import Front
from pagedattn.serve.server import Server
from pagedattn.serve.settings import ServeArgs
from pagedattn.serve.sockets import listen, url_of

BLOCKS, BLOCK, LENGTH = 65, 16, 512
SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'foo' %}{{ raise_exception('no foo here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 256,
}


def write_model(folder: Path) -> Path:
    """A seeded random Llama with a byte tokenizer, as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": SPECIALS[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    config = {**CONFIG, "vocab_size": 256 + len(SPECIALS)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config), folder / "model.safetensors")
    return folder


def _weights(config: dict) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * scale / columns**0.5

    wide, inner, vocabulary = 64, 128, config["vocab_size"]
    weights = {"model.embed_tokens.weight": matrix(vocabulary, wide, 8.0)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            weights[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, wide, 2.0)
        weights[at + "mlp.gate_proj.weight"] = matrix(inner, wide, 2.0)
        weights[at + "mlp.up_proj.weight"] = matrix(inner, wide, 2.0)
        weights[at + "mlp.down_proj.weight"] = matrix(wide, inner, 2.0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{norm}.weight"] = torch.ones(wide)
    weights["model.norm.weight"] = torch.ones(wide)
    weights["lm_head.weight"] = matrix(vocabulary, wide, 3.0)
    return weights


def engine_for(model: Path, **more: object) -> AsyncEngine:
    """The real engine around the tiny model, in a pool of 64 blocks."""
    settings = {"num_gpu_blocks_override": BLOCKS, "num_threads": 1, **more}
    args = EngineArgs(str(model), served_model_name=["tiny", "alias"], **settings)
    return AsyncEngine.from_args(args)


@dataclass(frozen=True, slots=True)
class Live:
    """A server that answers at `url`, its state, and a client for raw requests."""

    url: str
    front: Front
    engine: AsyncEngine
    http: httpx.Client

    def post(self, path: str, body: object, **more: object) -> httpx.Response:
        """POST a body: an object as JSON, or raw text as it stands."""
        raw = body if isinstance(body, str | bytes) else json.dumps(body)
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        return self.http.post(path, content=raw, headers=headers, **more)

    def complete(self, **body: object) -> dict:
        """The answer of /v1/completions, which must be 200."""
        reply = self.post("/v1/completions", {"temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def chat(self, **body: object) -> dict:
        """The answer of /v1/chat/completions, which must be 200."""
        reply = self.post("/v1/chat/completions", {"temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path: str, body: dict, **more: object) -> list[str]:
        """The data of every server-sent event of a streamed answer."""
        body = {"temperature": 0, "stream": True, **body}
        reply = self.post(path, body, **more)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        frames = reply.text.split("\n\n")
        assert frames.pop() == ""
        assert all(f.startswith("data: ") and "\n" not in f for f in frames)
        return [f.removeprefix("data: ") for f in frames]

    def chunks(self, path: str, body: dict, **more: object) -> list[dict]:
        """The same as objects; [DONE] must come once, at the end."""
        events = self.events(path, body, **more)
        assert events.count("[DONE]") == 1 and events[-1] == "[DONE]"
        return [json.loads(e) for e in events[:-1]]

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Wait until nothing runs and the gauges say so; then every block is free."""
        deadline = time.monotonic() + seconds
        quiet = 0  # looks in a row: requests may still be on their way in
        while quiet < 3:
            quiet = quiet + 1 if self._idle() else 0
            assert time.monotonic() < deadline, "requests are still under way"
            time.sleep(0.01)
        self.engine._engine.check()

    def _idle(self) -> bool:
        if self.front.in_flight or self.engine._engine.has_unfinished_requests():
            return False
        text = self.http.get("/metrics").text
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        zero = 'vllm:{}{{engine="0",model_name="tiny"}} 0.0'
        return all(zero.format(name) in text for name in gauges)


@contextmanager
def serving(engine: AsyncEngine, settings: ServeArgs | None = None) -> Iterator[Live]:
    """A live server for `engine`, on a free port, in a thread."""
    settings = settings or ServeArgs()
    settings.uvicorn_log_level = "warning"
    app = build_app(engine, settings)
    server = Server(app, log_stats=True)
    with listen("127.0.0.1", 0) as bound:
        url = url_of(bound)
        thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Live(url, app.state.front, engine, http)
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
