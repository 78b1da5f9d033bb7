"""The device that a stage computes on, whoever made it: CUDA and ROCm, XPU, MPS or the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from swarm.errors import UsageError


def choose_device(name: str = "auto") -> torch.device:
    """``auto`` is the accelerator that this build of torch sees, else the CPU; otherwise any device string.

    Raises:
        UsageError: there is no such device on this machine.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        known = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
        raise UsageError(
            f"There is no device {name!r} here: {str(error).splitlines()[0]}.",
            meaning="The peer was not started.",
            remedy=f"Use --device auto, or one of: {', '.join(known)}. A GPU needs the build of torch of its vendor.",
        ) from None
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether matrix products in bf16 are worth it on ``device``."""
    match device.type:
        case "cuda":
            return torch.cuda.is_bf16_supported(including_emulation=False)
        case "xpu":
            return True
        case "mps":
            return torch.backends.mps.is_macos_or_newer(14, 0)
        case _:
            return False


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 autocast where the device has it; weights and their updates stay fp32."""
    if not has_bf16(device):
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
