"""Memory for a step's intermediate numbers, kept from one step to the next.

A step that makes its arrays anew asks the system for pages, touches each for the first
time and gives them back, on every step. Knows arrays; nothing of what is computed.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor


class Scratch:
    """Arrays by name, as `native` makes them of tensors of one dtype, on one device.

    A name stands for one piece of memory, which grows to the largest shape it was
    asked for: the next call with that name may overwrite what this one returned.
    """

    def __init__(
        self,
        native: Callable[[Tensor], Any],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._native = native
        self._like = {"device": device, "dtype": dtype}
        self._memory: dict[str, Tensor] = {}
        self._arrays: dict[str, Any] = {}

    def __call__(self, name: str, *shape: int) -> Any:
        """An array of that shape; what stands in it is anyone's guess."""
        array = self._arrays.get(name)
        if array is None or array.shape != shape:
            array = self._arrays[name] = self._native(self._room(name, shape))
        return array

    def _room(self, name: str, shape: tuple[int, ...]) -> Tensor:
        size = prod(shape)
        memory = self._memory.get(name)
        if memory is None or len(memory) < size:
            memory = self._memory[name] = torch.empty(size, **self._like)
        return memory[:size].view(shape)
