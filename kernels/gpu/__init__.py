"""The kernels of spec.py in Triton, for CUDA devices: what `cpu` is for processors.

A model that is given this package as its kernels computes on a GPU; dense products are
cuBLAS's there, so those with packed weights are absent. With TRITON_INTERPRET=1 in the
environment before Triton is first imported, the same kernels run on CPU tensors.
"""

from ..spec import native as native
from .attention import cascade_attention as cascade_attention
from .attention import decode_attention as decode_attention
from .attention import prefill_attention as prefill_attention
from .elementwise import add_rms_norm as add_rms_norm
from .elementwise import gelu_tanh_mul as gelu_tanh_mul
from .elementwise import rms_norm as rms_norm
from .elementwise import silu_mul as silu_mul
from .experts import grouped_linear as grouped_linear
from .sampling import penalize as penalize
from .sampling import sample as sample
from .write import copy_blocks as copy_blocks
from .write import rotary as rotary
from .write import rotary_write as rotary_write
from .write import write_kv as write_kv
