"""Reasoning in what models write: one table, one small file for each format.

Knows which name, of vLLM's, stands for which parser.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagedattn.serve.reasoning.deepseek_r1 import DEEPSEEK_R1
from pagedattn.serve.reasoning.gpt_oss import GPT_OSS_REASONING
from pagedattn.serve.reasoning.granite import GRANITE
from pagedattn.serve.reasoning.mistral import MISTRAL
from pagedattn.serve.reasoning.qwen3 import QWEN3
from pagedattn.serve.reasoning.split import ReasoningParser

REASONING_PARSERS: Mapping[str, ReasoningParser] = {
    "deepseek_r1": DEEPSEEK_R1,
    "granite": GRANITE,
    "mistral": MISTRAL,
    "openai_gptoss": GPT_OSS_REASONING,
    "qwen3": QWEN3,
}
