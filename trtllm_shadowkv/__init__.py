"""ShadowKV (arXiv 2410.21465) as an extension of TensorRT-LLM's compiled-engine backend."""
