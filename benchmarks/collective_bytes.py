"""Bytes that the collectives of a compiled program bring to a device. Knows nothing of what it computes."""

import math
import re

_CALL = re.compile(r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]+)\]")


def received_bytes(text: str, num_devices: int) -> float:
    """Bytes that each of P devices receives in one run, all of them in every collective, each run once.

    An all-gather or all-to-all brings (P - 1) / P of its result, an all-reduce twice that, as a
    reduce-scatter and an all-gather, which bring it once each.

    Args:
      text: the compiled program's, HLO.
      num_devices: P.
    """
    others, total = (num_devices - 1) / num_devices, 0.0
    for shape, name, start in _CALL.findall(text):
        sizes = [
            math.prod(int(size) for size in dims.split(",")) * int(bits or 8) / 8
            for _, bits, dims in _ARRAY.findall(shape)
        ]
        if start and name in (
            "all-gather",
            "all-to-all",
            "collective-permute",
        ):  # as many operands come before the results
            sizes = sizes[len(sizes) // 2 :]
        factor = {"all-reduce": 2 * others, "reduce-scatter": num_devices - 1, "collective-permute": 1.0}
        total += sum(sizes) * factor.get(name, others)
    return total
