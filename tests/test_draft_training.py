"""Draft heads: learnt laws, chains as they are drawn, files, the training script."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsample import init_cache
from models.decoder import DecoderConfig
from models.draft_batches import frequent_tokens, learnable, make_draft_batch
from models.draft_head import DraftHead, draft_functions, join_base
from models.draft_training import (
    Aims,
    chain_outputs,
    first_head,
    frozen_weights,
    hidden_states,
    learnt_positions,
    make_draft_step,
    make_judge,
)
from models.random_weights import random_weights
from models.rollouts import Rollout
from models.value_training import TrainState, make_optimizer

BASE = DecoderConfig(
    vocab_size=24, width=16, num_layers=2, num_heads=2, num_kv_heads=1, head_size=8, mlp_width=24, norm_eps=1e-6,
    rope_theta=1e4, tied_embeddings=True, max_length=64,
)  # fmt: skip


def rollout(prompt, output):
    return Rollout(np.asarray(prompt, np.int32), np.asarray(output, np.int32), True)


def random_rollouts(number, seed=0):
    rng = np.random.default_rng(seed)
    return [rollout(rng.integers(0, 24, 3), rng.integers(0, 24, rng.integers(4, 9))) for _ in range(number)]


@pytest.fixture(scope="module")
def base():
    weights = random_weights(BASE, 3)
    weights["embedding"]["weight"] = 3 * weights["embedding"]["weight"]  # sharper laws
    return weights


def test_training_sees_chains_as_they_are_drawn(base):
    """Pass s at position j is s - 1 outputs fed back behind the slots start ... j - s + 1, made of true hidden states."""
    config, head = first_head(BASE, base, 1, seed=0)
    batch = make_draft_batch(random_rollouts(2), 12, 2, without_prompt=0.5)
    hidden = hidden_states(BASE)(base, batch.tokens)
    found = chain_outputs(config)(head, base["embedding"]["weight"], batch, hidden, 3)
    forward, weights = jax.jit(draft_functions(config)[0]), join_base(DraftHead(config, head, None), base)
    begin, nothing = 4, init_cache(1, 1, 0, config.num_kv_heads, config.head_size, jnp.float32)
    for row, start in enumerate([2, 0]):  # row 0 begins at the last token of its prompt
        assert batch.start[row] == start
        inputs = hidden[row : row + 1, start : begin + 1]
        for number in range(3):
            place = begin + number
            tokens = jnp.asarray(batch.tokens[row : row + 1, start + 1 : place + 2])
            positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            mask = jnp.asarray(np.tri(tokens.shape[1], dtype=bool))[None]
            outputs, _ = forward(weights, tokens, inputs, positions, nothing, mask)
            np.testing.assert_allclose(outputs[0, -1], found[number][row, place], atol=2e-5)
            inputs = jnp.concatenate([inputs, outputs[:, -1:]], axis=1)


def test_what_is_learnt_are_the_laws_of_output_tokens():
    batch = make_draft_batch([rollout([1, 2, 3], [4, 5, 6]), rollout([1], [2, 3])], 8, 3, without_prompt=0.4)
    np.testing.assert_array_equal(batch.start, [2, 0, 0])
    places = lambda number: [
        np.flatnonzero(row).tolist() for row in np.asarray(learnt_positions(batch, number))
    ]
    # Row 0 sees nothing before the last prompt token, so that its first law is that of the second output token.
    assert places(1) == [[2, 3], [0], []]
    assert places(2) == [[3], [], []]
    whole = make_draft_batch([rollout([1, 2, 3], [4, 5, 6])], 8, 1)
    assert np.flatnonzero(np.asarray(learnt_positions(whole, 1))[0]).tolist() == [1, 2, 3]
    assert learnable([rollout([1], [2])], 9) == [] == learnable([rollout([1] * 8, [2, 3])], 9)


def test_the_draft_vocabulary_is_the_most_frequent_tokens():
    ids, share = frequent_tokens([rollout([9, 9, 9], [5, 3, 5]), rollout([9], [7, 5])], 12, 2)
    assert ids.tolist() == [3, 5] and ids.dtype == np.int32 and share == 4 / 5
    with pytest.raises(ValueError, match="13 tokens, allowed is 1"):
        frequent_tokens([rollout([1], [2])], 12, 13)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_passes": 0}, "passes are 0"),
        ({"decay": 0.0}, "decay is 0"),
        ({"regression": -1.0}, "regression is -1"),
    ],
)
def test_aims_out_of_range_are_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        Aims(**wrong)


def test_a_head_learns_what_its_base_says(base):
    config, head = first_head(BASE, base, 1, seed=0)
    frozen = frozen_weights(base, np.arange(1, 24, dtype=np.int32), jnp.float32)
    optimizer = make_optimizer(1e-2, 5, 120)
    step = make_draft_step(BASE, config, optimizer, Aims(2, 0.8, 0.1), jnp.float32)
    judge = make_judge(BASE, config, 2, jnp.float32)
    train, held_out = random_rollouts(64, 1), make_draft_batch(random_rollouts(32, 2), 12, 32)
    before = judge(head, frozen, held_out)
    state = TrainState(head, optimizer.init(head))
    losses = []
    for number in range(120):
        chosen = [train[(16 * number + row) % 64] for row in range(16)]
        state, metrics = step(state, frozen, make_draft_batch(chosen, 12, 16, 0.25))
        losses.append(float(metrics["loss"]))
    after = judge(state.trained, frozen, held_out)
    assert np.mean(losses[-10:]) < 0.4 * np.mean(losses[:3])
    share = lambda sums, name: np.asarray(sums[name] / sums["positions"])
    for name in ("same", "overlap", "chain"):
        assert (share(after, name) > share(before, name) + 0.1).all(), (
            name,
            share(before, name),
            share(after, name),
        )
    assert (after["chain"] <= after["same"]).all() and after["chain"][0] == after["same"][0]
