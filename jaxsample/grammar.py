"""Grammars on the host: what a matcher must do, and its masks for the nodes of a draft.

Knows nothing of any grammar or of the device.
"""

from typing import Protocol

import numpy as np

from jaxsample.draft import Tree


class Matcher(Protocol):
    """Follows a grammar for one sample."""

    def fill(self, mask: np.ndarray) -> None:
        """Set bit i % 32 of word i // 32 of mask (u32[W], zeros) where token i may come next."""
        ...

    def accept(self, token: int) -> bool:
        """Go on by one token; False where it does not fit. Not called for a token that ends the request."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens accepted; called only where tokens are proposed."""
        ...


def fill_masks(
    matcher: Matcher, tree: Tree, tokens: np.ndarray, ends: frozenset[int], masks: np.ndarray
) -> None:
    """Write the tokens allowed after each node of a draft.

    Nodes that cannot be reached (behind a token the grammar refuses, or one that ends the request) allow all:
    nothing is ever drawn there.

    Args:
      matcher: has accepted all that was emitted, the root included; left as it was.
      tree: static tree of the N nodes.
      tokens: i32[N], the root and the proposals, PAD where there are none.
      ends: ids that end the request.
      masks: u32[N, W], written.
    """

    def visit(node: int) -> None:
        masks[node] = 0
        matcher.fill(masks[node])
        for child in tree.children[node]:
            token = int(tokens[child])
            if token < 0 or token in ends or not masks[node, token // 32] >> np.uint32(token % 32) & 1:
                continue
            if not matcher.accept(token):
                raise ValueError(f"the grammar allows token {token} and does not accept it")
            visit(child)
            matcher.rollback(1)

    masks[:] = 0xFFFFFFFF
    visit(0)
