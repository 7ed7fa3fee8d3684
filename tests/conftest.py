"""Test configuration: eight CPU devices, strict promotion, no compilation cache. Knows nothing of what is tested."""

import os

# The device count must be set before jax creates its backends; on a GPU machine it concerns the CPU backend only.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)

hypothesis.settings.register_profile("jaxsample", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("jaxsample")


def pytest_collection_modifyitems(config, items):
    """Leave out the tests marked `gpu` where jax has no GPU."""
    if jax.default_backend() == "gpu":
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
