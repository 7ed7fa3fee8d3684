"""Static trees."""

import numpy as np
import pytest

from jaxsample import ROOT, Tree, chain, from_paths


def test_the_root_alone_is_the_chain_without_proposals():
    assert chain(0) == ROOT
    assert ROOT.num_nodes == 1
    assert ROOT.max_depth == 0
    assert ROOT.children == ((),)


def test_a_chain_is_a_tree_with_one_child_a_node():
    tree = chain(3)
    assert tree.parents == (-1, 0, 1, 2)
    np.testing.assert_array_equal(tree.depth, [0, 1, 2, 3])
    np.testing.assert_array_equal(tree.ancestors, np.tril(np.ones((4, 4), bool)))


def test_paths_make_a_breadth_first_tree_with_all_their_prefixes():
    tree = from_paths([(0, 0), (1,), (0, 1)])
    assert tree.parents == (-1, 0, 0, 1, 1)
    assert tree.children == ((1, 2), (3, 4), (), (), ())
    np.testing.assert_array_equal(tree.depth, [0, 1, 1, 2, 2])
    np.testing.assert_array_equal(tree.ancestors[4], [True, True, False, False, True])


def test_equal_trees_are_equal_and_hash_alike():
    assert len({chain(2), Tree((-1, 0, 1)), from_paths([(0, 0)])}) == 1


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 0, 2), (-1, -1), (-1, 0, 1, 0)])
def test_parents_that_are_no_breadth_first_tree_are_refused(parents):
    with pytest.raises(ValueError, match="parents"):
        Tree(parents)


@pytest.mark.parametrize("paths", [[(1,)], [(0, 1)], [(-1,)]])
def test_paths_with_gaps_among_siblings_are_refused(paths):
    with pytest.raises(ValueError, match="sibling"):
        from_paths(paths)
