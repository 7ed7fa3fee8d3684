"""Test configuration: eight CPU devices, strict promotion, no compilation cache. Knows nothing of what is tested."""

import importlib.metadata
import os

# Flags must be set before jax creates its backends; on a GPU machine they concern the CPU backend only. Most of the
# tests' time goes into compiling, and the older of the two emitters of fusions that jaxlib 0.10 has compiles a third
# faster. Newer versions have one, so that other runs, CI's second leg among them, compile as users do.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10.")
).strip()

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)

hypothesis.settings.register_profile("jaxsample", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("jaxsample")


@pytest.fixture
def on_cpu():
    """The CPU as the default device: it is what meshes of `tests.meshes` are made of, on every machine."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def pytest_collection_modifyitems(config, items):
    """Leave out the tests marked `gpu` where jax has no GPU, and those marked `large` unless -m names them."""
    left_out = [] if jax.default_backend() == "gpu" else ["gpu"]
    left_out += [] if "large" in config.option.markexpr else ["large"]
    is_dropped = lambda item: any(item.get_closest_marker(name) for name in left_out)
    dropped = [item for item in items if is_dropped(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not is_dropped(item)]
