"""The kernels in Triton."""

from asyncrl.engines.native.cuda.kernels.adapter_merge import merger
from asyncrl.engines.native.cuda.kernels.attention import attend
from asyncrl.engines.native.cuda.kernels.elementwise import embed, gated, rms_norm
from asyncrl.engines.native.cuda.kernels.experts import add_weighted, choose, expert_product, sort, store_routes
from asyncrl.engines.native.cuda.kernels.fp8 import gated_quantized, quantize, rms_norm_quantized
from asyncrl.engines.native.cuda.kernels.fp8_product import fp8_product
from asyncrl.engines.native.cuda.kernels.rotary import rotate_and_store
from asyncrl.engines.native.cuda.kernels.sampling import sample
from asyncrl.engines.native.cuda.kernels.shapes import Kernels
from asyncrl.engines.native.cuda.kernels.verification import verify
from asyncrl.engines.native.cuda.kernels.weight_copy import mover

KERNELS = Kernels(
    *(embed, rms_norm, gated, rotate_and_store, attend, sample, verify),
    *(quantize, rms_norm_quantized, gated_quantized, fp8_product),
    *(choose, store_routes, sort, expert_product, add_weighted, mover, merger),
)
