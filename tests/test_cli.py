"""The command line: the flags of both rooms, and mistakes told in one line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from serve_live import write_model

from pagedattn.config import EngineArgs
from pagedattn.errors import UserError
from pagedattn.serve.cli import banner, build_parser, main, settings_from
from pagedattn.serve.settings import ServeArgs, read_template


def settings(*argv: str) -> tuple[EngineArgs, ServeArgs]:
    return settings_from(build_parser().parse_args(["serve", *argv]))


def test_defaults_are_the_dataclasses() -> None:
    engine, serve = settings()
    assert engine == EngineArgs() and serve == ServeArgs()
    assert (serve.host, serve.port) == ("127.0.0.1", 8000)


def test_every_setting_has_a_flag_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for f in (*fields(EngineArgs), *fields(ServeArgs)):
        assert "--" + f.name.replace("_", "-") in text


def test_flags_are_read() -> None:
    engine, serve = settings(
        *("some/model", "--host", "0.0.0.0", "--port", "9000", "--api-key", "a"),
        *("--api-key", "b", "--allowed-origins", '["http://x", "http://y"]'),
        *("--allowed-headers", "x-mine", "--allow-credentials", "--root-path", "/p"),
        *("--shutdown-timeout", "1.5", "--log-level", "debug", "--max-model-len", "2k"),
        *("--served-model-name", "one", "two", "--no-enable-prefix-caching"),
        *("--disable-uvicorn-access-log", "--chat-template", "{{ messages }}"),
    )
    assert engine.model == "some/model" and engine.max_model_len == 2000
    assert engine.served_model_name == ["one", "two"]
    assert not engine.enable_prefix_caching
    assert (serve.host, serve.port, serve.api_key) == ("0.0.0.0", 9000, ["a", "b"])
    assert serve.allowed_origins == ("http://x", "http://y")
    assert serve.allowed_headers == ("x-mine",) and serve.allow_credentials
    assert serve.shutdown_timeout == 1.5 and serve.root_path == "/p"
    assert serve.disable_uvicorn_access_log and serve.log_level == "debug"


def test_model_both_ways() -> None:
    assert settings("m")[0].model == settings("--model", "m")[0].model == "m"
    assert settings("m", "--model", "m")[0].model == "m"
    with pytest.raises(UserError, match="disagree"):
        settings("m", "--model", "other")


@pytest.mark.parametrize(
    "argv",
    [
        ("--port", "70000"),
        ("--shutdown-timeout", "-1"),
        ("--shutdown-timeout", "nan"),
        ("--api-key", ""),
        ("--max-num-seqs", "0"),
        ("m", "--model", "other"),
    ],
)
def test_bad_values_are_one_line(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pagedattn: error: ") and said.count("\n") == 1


def test_start_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "tiny"))
    missing = str(tmp_path / "nothing.gguf")
    for argv, word in (
        ((missing,), "nothing.gguf"),
        ((model, "--max-model-len", "100000"), "max_model_len=100000"),
        ((model, "--chat-template", "no-such-file"), "chat_template"),
        ((model, "--chat-template", "{% if {}"), "template"),
        ((model, "--host", "not a host"), "not a host"),
    ):
        assert main(["serve", "--port", "0", *argv]) in (1, 2)
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("pagedattn: error: ")
        assert said.err.count("\n") == 1 and word in said.err, said.err


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("serve", "--port", "x"),
        ("serve", "--no-such-flag"),
        ("serve", "--log-level", "loud"),
        ("serve", "--allowed-origins", "[1]"),
        ("serve", "--allowed-origins", "[oops"),
    ],
)
def test_argparse_refuses_the_rest(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2


def test_chat_template_is_a_file_or_jinja(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("from a file {{ messages }}")
    assert read_template(str(file)) == "from a file {{ messages }}"
    assert read_template("{{ messages }}") == "{{ messages }}"
    assert read_template("{% x %}\n" * 2000) == "{% x %}\n" * 2000
    assert read_template(None) is None
    with pytest.raises(UserError, match="neither"):
        read_template("no/such/file.jinja")


def test_banner_says_how_it_runs() -> None:
    facts = {
        "architecture": "Llama",
        "dtype": "float32",
        "linear": "oneDNN",
        "kernels": "numba",
    }
    facts |= {"threads": "2", "num_gpu_blocks": "128", "block_size": "16"}
    facts |= {"kv_cache_bytes": str(3 << 29), "max_model_len": "1024"}
    text = banner(facts, ["first", "second"], "http://127.0.0.1:8000")
    assert "first, second (Llama)" in text and "oneDNN, 2 threads" in text
    assert "128 blocks of 16 tokens, 2048 (1.5 GiB)" in text
    assert "2.0 requests at full length" in text
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in text
    assert '"model": "first"' in text


def test_kernels_can_be_compiled_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download-kernels"]) == 0
    said = capsys.readouterr()
    folder = Path(said.out.removeprefix("kernels are in ").strip())
    assert folder.is_dir() and "Kernels" in said.err


def test_the_command_line_is_light() -> None:
    """Reading flags loads neither torch nor the web framework."""
    code = (
        "import sys; from pagedattn.serve.cli import build_parser; build_parser();"
        "heavy = {'torch', 'numba', 'transformers', 'fastapi', 'uvicorn'};"
        "sys.exit(bool(heavy & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_serving_never_imports_transformers() -> None:
    code = (
        "import sys; import pagedattn.serve.app, pagedattn.serve.server;"
        "import pagedattn.async_engine; sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_encoders_banner_says_how_to_embed() -> None:
    facts = {"architecture": "BertModel", "linear": "oneDNN", "threads": "2"}
    facts |= {"hidden_size": "384", "pooling": "MEAN", "max_model_len": "256"}
    said = banner(facts, ["mini"], "http://x:1", keyed=True)
    assert "curl http://x:1/v1/embeddings" in said and "Bearer YOUR_KEY" in said
    assert "256 tokens" in said and "KV pool" not in said
