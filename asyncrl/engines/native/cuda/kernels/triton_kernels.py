"""The kernels in Triton."""

from asyncrl.engines.native.cuda.kernels.attention import attend
from asyncrl.engines.native.cuda.kernels.elementwise import embed, gated, rms_norm
from asyncrl.engines.native.cuda.kernels.rotary import rotate_and_store
from asyncrl.engines.native.cuda.kernels.sampling import sample
from asyncrl.engines.native.cuda.kernels.shapes import Kernels
from asyncrl.engines.native.cuda.kernels.verification import verify

KERNELS = Kernels(embed, rms_norm, gated, rotate_and_store, attend, sample, verify)
