"""Tool calls in what models write: one table, one small file for each format.

Knows which name stands for which parser. A new format is one file and one line here,
or a file given with --tool-parser-plugin.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagedattn.serve.tools.calls import ToolParser
from pagedattn.serve.tools.deepseek_v3 import DEEPSEEK_V3
from pagedattn.serve.tools.gpt_oss import GPT_OSS
from pagedattn.serve.tools.granite import GRANITE
from pagedattn.serve.tools.hermes import HERMES
from pagedattn.serve.tools.llama3_json import LLAMA3_JSON
from pagedattn.serve.tools.mistral import MISTRAL
from pagedattn.serve.tools.pythonic import PYTHONIC
from pagedattn.serve.tools.qwen3_coder import QWEN3_CODER

# vLLM's names; what one parser here reads may have several there.
TOOL_PARSERS: Mapping[str, ToolParser] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V3,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "granite4": HERMES,
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "openai": GPT_OSS,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
}
