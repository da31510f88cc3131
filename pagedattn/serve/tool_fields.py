"""The fields of a request that speak of tools and of thinking.

Knows their shapes and which go together; which parser reads the answer, and whether
the server has one, is `reading`'s affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from pagedattn.serve.problems import ApiError

MOST_TOOLS = 1_024  # in one request
LONGEST_NAME = 256  # characters of a tool's name

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Function(BaseModel):
    """What a tool is called and takes; a JSON schema, or nothing, as `parameters`."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One tool; functions are the only kind."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    """The function that must be called."""

    model_config = ConfigDict(strict=True)

    name: str


class NamedChoice(BaseModel):
    """`tool_choice` as one function."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: FunctionName


class Thinking(BaseModel):
    """`thinking`, as Z.ai's and DeepSeek's API have it: on or off, and no budget."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["enabled", "disabled"]


class ToolFields(BaseModel):
    """Tools, which of them to call, and whether and how hard to think."""

    model_config = ConfigDict(strict=True)

    tools: list[Tool] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None

    def check_tools(self) -> None:
        """Refuse choices without tools, and tools that are not there."""
        if self.tools == []:
            _refuse("tools", "must not be empty: leave it out")
        if self.tool_choice not in (None, "none") and not self.tools:
            _refuse("tool_choice", "needs tools")
        if self.named is not None and self.named not in self.schemas:
            _refuse(
                "tool_choice", f"names {self.named[:80]!r}, which no tool is called"
            )

    @property
    def named(self) -> str | None:
        """The one function that must be called, if `tool_choice` names one."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedChoice) else None

    @property
    def choice(self) -> str:
        """none, auto, required or named: what `tool_choice` is, given or by default."""
        if self.named is not None:
            return "named"
        return str(self.tool_choice or ("auto" if self.tools else "none"))

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """Every tool's name and its parameters' schema."""
        functions = [tool.function for tool in self.tools or []]
        return {f.name: f.parameters or {} for f in functions}

    @property
    def one_call(self) -> bool:
        """Whether there may be one call at most."""
        return self.parallel_tool_calls is False or self.named is not None

    @property
    def thinks(self) -> bool | None:
        """Whether to think at all, in whichever words it was said; None: not said."""
        if self.reasoning_effort == "none":
            return False
        if self.thinking is not None:
            return self.thinking.type == "enabled"
        return self.enable_thinking

    def tool_dicts(self) -> list[dict[str, Any]] | None:
        """The tools as the client sent them, for templates."""
        return [t.model_dump(exclude_unset=True) for t in self.tools or []] or None


def _refuse(param: str, rule: str) -> NoReturn:
    raise ApiError(400, f"{param} {rule}.", param)
