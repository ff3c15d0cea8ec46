"""SGLang on a machine without accelerator or compiled kernels, for tests and benchmarks of the real engine.

Two small parts, put into the test environments by their recipes and never into a user's: an out-of-tree platform
(:mod:`.platform`) and a shim that lets SGLang's CUDA-linked torchvision be imported (:mod:`.torchvision_ops`).
"""
