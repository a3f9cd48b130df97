"""ShadowKV behind a Triton Inference Server: a model repository, and the process that holds the engine."""
