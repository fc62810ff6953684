"""The operations as triton kernels. Each module holds kernels and, for torch tensors, the functions that launch them.

Weights are read as bytes and decoded by bits: a native FP8 type does not exist below sm_89, and so one source serves
sm_75 to sm_120. Activations and sums are float32. No kernel uses atomics, so results do not depend on scheduling, and a
launch waits for nothing: sizes come from shapes, what only the device knows (routing, lengths) stays there, and a CUDA
graph can hold it. Wrong shapes are bugs of the caller and fail assertions.

Everything runs where its tensors are, which is to be the current device. With TRITON_INTERPRET=1 in the environment
before triton is imported, its interpreter runs the same kernels on CPU tensors: so they are tested (tests/cuda).

This package is not the table of operations (`mosaic.runtime.ops.Ops`), and without triton it cannot be imported.
"""
