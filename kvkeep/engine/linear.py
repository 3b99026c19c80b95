"""Linear layers whose weights are packed once for the fast float32 kernels of a CPU.

Must not know pages or requests.
"""

import torch
from torch import nn

# How many rows the packed layout is tuned for.  Measured from 1 to 1,536 rows on SmolLM2's shapes: packed for 128
# it is within 5 % of the best at every count, packed for 1 it is up to twice slower from 4 rows up.
PACKED_FOR_ROWS = 128


class PackedLinear(nn.Module):
    """y = W x + b through oneDNN with W in oneDNN's own blocked layout.

    torch's own float32 path on a CPU is MKL's sgemm.  On an AMD EPYC it runs at 100 GFLOP/s a core where this runs
    at 230, at 4 rows 8 (MKL) against 60.  Rows do not depend on how many there are, from 2 rows up, with any number
    of threads; `arithmetic.calibrate` checks it on the machine at hand.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR_ROWS)
        bias: torch.Tensor | None = linear.bias  # torch declares it a Tensor; it is None without one
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


def can_pack(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch build has the packed kernels for the device and dtype."""
    return (
        torch.device(device).type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@torch.no_grad()
def pack_linears(model: nn.Module) -> int:
    """Replaces every nn.Linear of `model` by a packed one; how many it replaced."""
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, linear in found:
        setattr(parent, name, PackedLinear(linear))
    return len(found)
