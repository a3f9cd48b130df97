"""The oracle: ShadowKV as pure functions of float32 CPU tensors, one step of the algorithms a file.

Nothing here is fast. Every kernel, plugin and executor is compared with it, so each function follows its formula
as closely as code can, and names its source. "Algorithm 1" and "Algorithm 2" are those of arXiv 2410.21465.
"""
