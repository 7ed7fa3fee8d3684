"""Which kernels a decoder runs with: those for one GPU, or none."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from models import attention_kernel, norm_kernel, projection_kernel


class Kernels(NamedTuple):
    """The functions of the models' kernels."""

    takes: Callable[..., bool] = attention_kernel.takes
    attend: Callable[..., Any] = attention_kernel.attend_new
    add_norm: Callable[..., Any] = norm_kernel.add_norm
    splits: Callable[..., bool] = projection_kernel.splits
    project_parts: Callable[..., Any] = projection_kernel.project_parts
    fits_whole: Callable[..., bool] = projection_kernel.fits_whole
    project_whole: Callable[..., Any] = projection_kernel.project_whole


def kernels_of(mesh: Any = None) -> Kernels | None:
    """The kernels for models on this device; None where XLA computes all.

    Args:
      mesh: where the weights lie; None: on one device. On a mesh XLA splits what it computes, not a kernel.
    """
    return Kernels() if jax.default_backend() == "gpu" and mesh is None else None
