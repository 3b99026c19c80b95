"""`python -m bench.peers.sglang_peer`, in an environment with SGLang: what must be so before SGLang is imported.

Must not know a cache.

SGLang imports torchvision, and torchvision's wheel is built for CUDA: over a torch for CPUs its operators do not load,
while its Python half describes two that must be known by then.  They are declared here, and nothing calls them.
"""

import os
import warnings

import torch

from bench.peers.wire import answers_apart, serve


def main() -> None:
    """Answers until the input ends."""
    answers = answers_apart()
    warnings.filterwarnings("ignore")  # of what only GPUs have
    torch.set_num_threads(1)
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from bench.peers.sglang_tree import SglangAdapter

    serve(SglangAdapter(), answers)
    os._exit(0)  # its threads would wait


if __name__ == "__main__":
    main()
