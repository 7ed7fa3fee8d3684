"""Targets against plain loops and hand-counted cases, known values recovered, batches, resuming, figures."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsample as js
from models.load_value import ValueModel, load_value_model, save_value_model
from models.lookup import init_lookup_cache, lookup_forward
from models.random_weights import random_weights
from models.rollouts import Rollout, read_rollouts, rollout_line, split_by_prompt
from models.value_batches import (
    Labels,
    batches_from,
    end_of,
    epoch_of,
    gamma_of,
    make_batch,
    mean_value,
    trainable,
    widths_for,
)
from models.value_fit import claim, fit, read_log
from models.value_head import value_functions
from models.value_report import Predictions, calibration, predict, prompt_error, report
from models.value_training import (
    TrainState,
    cross_entropy,
    first_layers,
    join_weights,
    lambda_returns,
    make_optimizer,
    make_train_step,
    predicted_length,
    split_weights,
    squared_error,
    target_mask,
    value_logits,
)
from tests.test_loaders import same_weights
from tests.test_models import SMALL, new_cache

GAMMA, STATES, EOS = 0.9, 8, 8
NOTHING = {"trunk": {}}  # is frozen
WINDOW, ROWS, STEPS = 32, 32, 125


def rollout(num_prompt, num_output, *, finished=True, first=1):
    tokens = np.arange(first, first + num_prompt + num_output, dtype=np.int32) % SMALL.vocab_size
    return Rollout(tokens[:num_prompt], tokens[num_prompt:], finished)


@functools.partial(jax.jit, static_argnums=(2, 3))
def targets(old, batch, gamma, lam):
    """(nearness f32[B, N], mask bool[B, N])."""
    return lambda_returns(old, batch, gamma, lam), target_mask(batch)


def test_targets_of_hand_counted_cases():
    """Three prompt tokens, four output tokens: remaining 4, 3, 2, 1, 0 from the last prompt token on."""
    g = 0.5
    labels = Labels(g, window=8)
    short_window = Labels(g, window=5)
    cases = [
        (labels, rollout(3, 4), [g**4, g**3, g**2, g, 1.0]),
        (short_window, rollout(3, 4), [g**4, g**3, g**2]),  # the true remaining length, as far as is kept
        (Labels(g, 8, cap=3), rollout(3, 4), [0.0] * 5),
        (Labels(g, 8, cap=4), rollout(3, 4), [g**4, g**3, g**2, g, 1.0]),
        (Labels(g, 8, cap=4), rollout(3, 4, finished=False), [0.0] * 5),  # at least five tokens
        (Labels(g, 8, truncated="infinite"), rollout(3, 4, finished=False), [0.0] * 5),
        (
            labels,
            rollout(3, 4, finished=False),
            [g**4 / 2, g**3 / 2, g**2 / 2, g / 2],
        ),  # 1/2 stands at the end
        (short_window, rollout(3, 4, finished=False), [g**2 / 2, g / 2]),
        (labels, rollout(1, 1), [g, 1.0]),
    ]
    for kind in {case[0] for case in cases}:
        chosen = [case for case in cases if case[0] == kind]
        batch = make_batch([case[1] for case in chosen], kind, 8, 9)  # one shape for all
        nearness, mask = map(np.asarray, targets(np.full((9, 8), 0.5, np.float32), batch, g, 1.0))
        assert not mask[len(chosen) :].any()
        for row, (_, one, wanted) in enumerate(chosen):
            first = len(one.prompt) - 1
            assert mask[row].tolist() == [first <= i < first + len(wanted) for i in range(8)]
            np.testing.assert_allclose(nearness[row][mask[row]], wanted, rtol=1e-6, atol=0)
    masked = Labels(g, 8, truncated="mask")
    both = [rollout(3, 4, finished=False), rollout(3, 4), rollout(9, 1)]
    assert trainable(both, masked) == both[1:2] and trainable(both, labels) == both[:2]
    assert end_of(both[1], short_window) == g**2
    assert mean_value([rollout(1, 2)], labels) == pytest.approx(1 - (1 + g) / 2)


def test_lambda_returns_equal_a_plain_loop_over_advantages():
    rng = np.random.default_rng(0)
    rollouts = [
        rollout(int(p), int(n), finished=bool(f)) for p, n, f in rng.integers(1, 7, (20, 3)) // [1, 1, 4]
    ]
    labels = Labels(0.93, window=10, cap=5)
    batch = make_batch(rollouts, labels, 12, 20)
    old = rng.uniform(0, 1, (20, 12)).astype(np.float32)
    for lam in (0.6, 0.0):
        nearness, mask = map(np.asarray, targets(old, batch, labels.gamma, lam))
        for row in range(20):
            last = batch.length[row] - 1
            returns = -(1 - old[row].astype(np.float64))  # V_old of the paper, in (-1, 0)
            if batch.known[row]:
                returns[last] = -(1 - float(batch.end[row]))
            advantage, wanted = 0.0, {last: returns[last]}
            for t in range(last - 1, -1, -1):
                delta = -(1 - labels.gamma) + labels.gamma * returns[t + 1] - returns[t]
                advantage = delta + labels.gamma * lam * advantage
                wanted[t] = returns[t] + advantage
            for t in np.flatnonzero(mask[row]):
                assert abs((nearness[row, t] - 1) - wanted[t]) < 2e-6


def test_targets_of_long_rollouts_keep_their_precision():
    labels = Labels(0.9998, window=3000)
    batch = make_batch([rollout(1, 2999)], labels, 3000, 1)
    nearness, mask = map(np.asarray, targets(np.full((1, 3000), 0.5, np.float32), batch, 0.9998, 1.0))
    wanted = 0.9998 ** np.arange(2999, -1, -1)
    assert mask.all() and np.abs(nearness[0] - wanted).max() <= 2.0**-24


def test_losses_have_their_minimum_at_the_target():
    u = jnp.array([0.02, 0.5, 0.98], jnp.float32)
    z = jnp.log((1 - u) / u)
    for loss in (squared_error, cross_entropy):
        slope = jax.vmap(jax.grad(loss))
        assert (
            np.abs(slope(z, u)).max() < 1e-6 and (slope(z + 1, u) > 0).all() and (slope(z - 1, u) < 0).all()
        )
    lengths = np.array([1.0, 100.0, 2500.0])
    z = np.log((1 - 0.9998**lengths) / 0.9998**lengths)
    np.testing.assert_allclose(predicted_length(z, 0.9998), lengths, rtol=1e-9)
    assert gamma_of([300] * 200) == pytest.approx(0.01 ** (1 / 300))


def test_batches_hold_each_rollout_once_an_epoch_and_depend_on_the_step_alone():
    lengths = np.random.default_rng(1).integers(2, 200, 101)
    widths = widths_for(lengths, 150)
    assert (
        widths == (64, 128, 150) and widths_for([3], 40) == (40,) and widths_for([64, 65], 999) == (64, 128)
    )
    seen = [epoch_of(epoch, lengths, widths, 8, seed=3) for epoch in (0, 1)]
    assert [len(epoch) for epoch in seen] == [13, 13]
    for epoch in seen:
        assert sorted(np.concatenate([chosen for _, chosen in epoch])) == list(range(101))
        assert all(lengths[chosen].clip(max=150).max() <= width for width, chosen in epoch)
        assert sorted(len(chosen) for _, chosen in epoch)[:2] == [5, 8]
    assert [x.tolist() for _, x in seen[0]] != [x.tolist() for _, x in seen[1]]
    whole = seen[0] + seen[1]
    for step in (0, 5, 13, 20):
        for (width, chosen), wanted in zip(batches_from(step, lengths, widths, 8, 3), whole[step:]):
            assert width == wanted[0] and (chosen == wanted[1]).all()


def test_rollouts_go_through_a_file_and_what_is_none_is_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(rollout_line([1, 2], [3, 8], "stop") + "\n\n" + rollout_line([4], [5], "length") + "\n")
    one, other = read_rollouts([path], 9)
    assert one.tokens.tolist() == [1, 2, 3, 8] and one.finished and not other.finished
    for line, named in (
        (rollout_line([1], [9], "stop"), r"line 1: token_ids is \[9\], expected token ids in 0 ... 8"),
        (rollout_line([], [1], "stop"), "prompt_token_ids"),
        (rollout_line([1], [1], "cancelled"), "finish_reason is 'cancelled'"),
        ("[]", "not a JSON object"),
        ("", "no rollouts"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=named):
            read_rollouts([path], 9)
    many = [rollout(1, 2, first=first) for first in range(10) for _ in range(3)]
    kept, out = split_by_prompt(many, 0.15, seed=0)
    assert len(kept) == 24 and len(out) == 6
    assert not {x.prompt[0] for x in kept} & {x.prompt[0] for x in out}
    for fraction in (-0.1, 1.0):
        with pytest.raises(ValueError, match="fraction"):
            split_by_prompt(many, fraction, 0)


def test_a_value_model_begins_with_the_first_layers_and_trains_the_part_asked_for(small):
    base, weights = random_weights(SMALL, 0), small.weights
    assert (
        small.config.num_layers == 1
        and list(weights["trunk"]["layers"]) == [0]
        and "head" not in weights["trunk"]
    )
    assert same_weights(weights["trunk"]["layers"][0], base["layers"][0])
    bias = np.asarray(weights["head"]["summary"]["bias"])  # the head at a hidden state of zeros
    assert 1 / (1 + np.exp(-bias)) == pytest.approx(0.4)
    for train, names in (
        ("all", {"embedding", "layers", "norm"}),
        ("layers", {"layers", "norm"}),
        ("head", set()),
    ):
        trained, frozen = split_weights(weights, train)
        assert set(trained["trunk"]) == names and "head" in trained
        assert same_weights(join_weights(trained, frozen), weights)
    for number in (0, 3):
        with pytest.raises(ValueError, match=f"num_layers is {number}, allowed is 1 ... 2"):
            first_layers(SMALL, base, number, 0)
    for arguments, named in (((1e-3, 5, 5), "warm-up is 5"), ((0.0, 0, 5), "learning rate")):
        with pytest.raises(ValueError, match=named):
            make_optimizer(*arguments)


# A chain of eight states: token s goes to token t with TRANSITIONS[s, t], and ends with EOS.
def _transitions():
    rng = np.random.default_rng(5)
    matrix = np.concatenate(
        [rng.dirichlet(np.full(STATES, 0.3), STATES) + 2 * np.eye(STATES), np.zeros((STATES, 1))], 1
    )
    stop = np.geomspace(0.02, 0.7, STATES)
    matrix *= ((1 - stop) / matrix.sum(axis=1))[:, None]
    matrix[:, EOS] = stop
    return matrix


TRANSITIONS = _transitions()
NEARNESS = np.linalg.solve(np.eye(STATES) - GAMMA * TRANSITIONS[:, :STATES], GAMMA * TRANSITIONS[:, EOS])


def walks(num, seed, most):
    """Rollouts of the chain, cut off after `most` output tokens."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for _ in range(num):
        walk = [int(rng.integers(STATES))]
        while walk[-1] != EOS and len(walk) <= most:
            walk.append(int(rng.choice(STATES + 1, p=TRANSITIONS[walk[-1]])))
        rollouts.append(Rollout(np.array(walk[:1], np.int32), np.array(walk[1:], np.int32), walk[-1] == EOS))
    return rollouts


@dataclasses.dataclass(frozen=True)
class Small:
    """One compiled step and the weights to begin with."""

    config: object
    weights: dict
    step: object
    logits: object
    optimizer: object

    def state(self):
        weights = jax.tree.map(jnp.copy, self.weights)  # the step takes its state's memory
        state = TrainState(weights, self.optimizer.init(weights))
        return jax.device_put(state, jax.devices()[0])  # as `fit` places it

    def batches(self, rollouts, labels):
        rollouts = trainable(rollouts, labels)
        lengths = [len(x.tokens) for x in rollouts]

        def from_step(step):
            for width, chosen in batches_from(step, lengths, (WINDOW,), ROWS, seed=0):
                yield make_batch([rollouts[index] for index in chosen], labels, width, ROWS)

        return from_step

    def train(self, rollouts, labels, steps=STEPS):
        state = self.state()
        for _, batch in zip(range(steps), self.batches(rollouts, labels)(0)):
            state, _ = self.step(state, NOTHING, batch)
        return state.trained


@pytest.fixture(scope="module")
def small():
    config, weights = first_layers(SMALL, random_weights(SMALL, 0), 1, seed=1, value=0.4)
    optimizer = make_optimizer(1e-2, 10, STEPS)
    step = make_train_step(config, optimizer, gamma=GAMMA)
    return Small(config, weights, step, jax.jit(value_logits(config)), optimizer)


def errors_by_state(small, weights):
    """Of each state: (mean error, largest error) of 1 - v over 256 walks that were not trained on."""
    batch = make_batch(walks(256, seed=99, most=WINDOW - 1), Labels(GAMMA, WINDOW), WINDOW, 256)
    rows = zip(
        np.split(np.asarray(batch.tokens), 256 // ROWS), np.split(np.asarray(target_mask(batch)), 256 // ROWS)
    )
    pairs = [(tokens[mask], np.asarray(small.logits(weights, tokens))[mask]) for tokens, mask in rows]
    tokens, z = (np.concatenate(parts) for parts in zip(*pairs))
    error = 1 / (1 + np.exp(z)) - np.append(NEARNESS, 1.0)[np.minimum(tokens, EOS)]
    each = [error[tokens == state] for state in range(STATES + 1)]
    return np.array([x.mean() for x in each]), np.array([np.abs(x).max() for x in each])


def test_training_recovers_the_values_of_a_markov_chain(small):
    """From whole walks, and from walks cut off after six tokens; leaving the latter out would not do."""
    assert np.ptp(NEARNESS) > 0.3
    mean, largest = errors_by_state(small, small.train(walks(4000, 1, most=200), Labels(GAMMA, WINDOW)))
    assert np.abs(mean).max() < 0.05 and largest.max() < 0.2
    cut = walks(4000, 2, most=6)
    assert 0.6 < np.mean([x.finished for x in cut]) < 0.9
    mean, _ = errors_by_state(small, small.train(cut, Labels(GAMMA, WINDOW)))
    assert np.abs(mean).max() < 0.05
    mean, _ = errors_by_state(small, small.train(cut, Labels(GAMMA, WINDOW, truncated="mask"), steps=50))
    assert mean.max() > 0.15


def test_a_resumed_run_gives_the_bits_of_one_that_was_not_stopped_and_its_model_loads(small, tmp_path):
    batches = small.batches(walks(300, 3, most=40), Labels(GAMMA, WINDOW))
    step = lambda state, batch: small.step(state, NOTHING, batch)
    how = {"save_every": 3, "log_every": 2}

    def stop_at(step, entry):
        if step == 5:
            raise KeyboardInterrupt

    for name in ("whole", "stopped"):
        claim(tmp_path / name, {"seed": 0})
    whole = fit(tmp_path / "whole", small.state(), step, batches, steps=8, **how)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "stopped", small.state(), step, batches, steps=8, show=stop_at, **how)
    shown = []
    again = fit(
        tmp_path / "stopped", small.state(), step, batches, steps=8, show=lambda k, _: shown.append(k), **how
    )
    assert shown == [3, 4, 5, 6, 7, 8]  # went on from the checkpoint
    assert same_weights(again.trained, whole.trained) and same_weights(again.optimizer, whole.optimizer)
    log = read_log(tmp_path / "stopped")
    assert [line["step"] for line in log] == [2, 3, 4, 6, 8] and log == read_log(tmp_path / "whole")
    assert not same_weights(whole.trained, small.weights)
    with pytest.raises(ValueError, match="begun with seed 0, not 1"):
        claim(tmp_path / "whole", {"seed": 1})
    with pytest.raises(ValueError, match="no folder of training"):
        claim(tmp_path, {})

    save_value_model(tmp_path / "model", ValueModel(small.config, whole.trained, None, GAMMA))
    loaded = load_value_model(tmp_path / "model", np.float32)
    assert (
        loaded.config == small.config
        and loaded.gamma == GAMMA
        and same_weights(loaded.weights, whole.trained)
    )
    forward, value = value_functions(loaded.config)  # as a guided step runs it, by mask
    tokens = make_batch(walks(ROWS, 4, most=40), Labels(GAMMA, WINDOW), WINDOW, ROWS).tokens
    mask = np.broadcast_to(
        np.concatenate([np.zeros((WINDOW, 1)), np.tri(WINDOW)], 1), (ROWS, WINDOW, WINDOW + 1)
    )
    positions = np.broadcast_to(np.arange(WINDOW, dtype=np.int32), (ROWS, WINDOW))
    hidden, _ = jax.jit(forward)(
        loaded.weights, tokens, positions, new_cache(loaded.config, ROWS, 1), mask > 0
    )
    np.testing.assert_allclose(value(loaded.weights, hidden), small.logits(whole.trained, tokens), atol=1e-5)


@pytest.mark.large
def test_a_trained_model_guides_replies_to_the_lengths_that_exact_values_give(small, tmp_path):
    """The chain as the guided model, p' ~ p exp(s v) from its values; 128 replies for either sign of s."""
    weights = small.train(walks(4000, 1, most=200), Labels(GAMMA, WINDOW))
    save_value_model(tmp_path / "model", ValueModel(small.config, weights, None, GAMMA))
    loaded = load_value_model(tmp_path / "model", np.float32)
    most, scale, num_rows = 30, np.array([-4.0, 4.0]), 256
    limits, features = (
        js.Limits(STATES + 1, max_length=WINDOW, num_guided=STATES + 1),
        js.Features(num_candidates=16, full_rows=False),
    )
    logits = jnp.asarray(
        np.log(np.maximum(np.vstack([TRANSITIONS, np.ones(STATES + 1)]), 1e-30)), jnp.float32
    )
    step = js.make_guided_step(
        lookup_forward,
        lambda weights, hidden: logits[hidden[..., 1]],
        *value_functions(loaded.config),
        limits=limits,
        features=features,
    )
    row = lambda seed: js.make_params(
        limits, seed=seed, top_k=STATES + 1, max_tokens=most, eos_token_ids=[EOS]
    )
    params, stop = js.stack_rows([row(seed) for seed in range(num_rows)])
    guides = [js.make_guidance(limits, row(0)[0], mode="centered_exp", scale=float(s)) for s in scale]
    guidance = jax.tree.map(lambda *parts: np.repeat(np.concatenate(parts), num_rows // 2, axis=0), *guides)
    slots, first = np.arange(num_rows, dtype=np.int32), np.full((num_rows, WINDOW), js.PAD, np.int32)
    first[:, 0] = 0
    requests = js.admit(
        js.empty_requests(limits, num_rows),
        slots,
        params,
        stop,
        first,
        np.ones(num_rows, np.int32),
        limits=limits,
    )
    values = js.admit_guided(js.init_guided(new_cache(loaded.config, num_rows, WINDOW)), slots, guidance)
    ones = np.ones(num_rows, np.int32)
    values = js.make_value_prefill(value_functions(loaded.config)[0])(
        loaded.weights, values, first[:, :1], ones
    )
    cache, lengths = init_lookup_cache(num_rows, WINDOW), np.zeros(num_rows)
    for _ in range(most):
        requests, cache, values, record = step(
            jnp.zeros(2, jnp.uint32), loaded.weights, requests, cache, values
        )
        lengths += js.unpack(record, features).count
    for s, found in zip(scale, np.split(lengths, 2)):
        tilted = TRANSITIONS * np.exp(s * np.append(1 - NEARNESS, 0.0))
        tilted = (tilted / tilted.sum(axis=1, keepdims=True))[:, :STATES]
        goes_on, exact = np.eye(STATES)[0], []
        for _ in range(most):  # of min(length, most): the chance that a reply has more than t tokens, summed
            exact.append(goes_on.sum())
            goes_on = goes_on @ tilted
        error = found.std() / np.sqrt(len(found))
        assert abs(found.mean() - sum(exact)) < 3 * error + 0.05 * sum(exact)
    assert lengths[: num_rows // 2].mean() < 0.6 * lengths[num_rows // 2 :].mean()


def test_figures_of_known_predictions():
    rng = np.random.default_rng(0)
    lengths = np.array([3, 9, 5, 5, 30])
    prompts = [0, 0, 1, 1, 2]
    position = np.concatenate([np.arange(n + 1) for n in lengths])
    remaining = np.concatenate([np.arange(n, -1, -1) for n in lengths])
    prompt = np.repeat(prompts, lengths + 1)
    z = np.log((1 - GAMMA ** (remaining + 1e-9)) / GAMMA**remaining)
    exact = report(Predictions(z.astype(np.float32), position, remaining, prompt), GAMMA)
    assert exact["value_error"] < 1e-6 and exact["relative_error"] < 1e-5 and exact["explained"] > 1 - 1e-9
    assert [x["from"] for x in exact["by_position"]] == [0, 1, 2, 4, 8, 16]
    assert sum(x["tokens"] for x in exact["by_position"]) == lengths.sum()
    assert all(abs(x["predicted"] - x["realised"]) < 1e-3 for x in exact["calibration"])
    # The first prompt's rollouts are 3 and 9 tokens; the last prompt has one only.
    reference = np.log((GAMMA**3 + GAMMA**9) / 2) / np.log(GAMMA)
    found = prompt_error(Predictions(z.astype(np.float32), position, remaining, prompt), GAMMA)
    assert found["prompts"] == 2 and found["rollouts"] == 2
    assert found["relative_error"] == pytest.approx(abs(3 - reference) / reference / 2, rel=1e-4)
    constant = Predictions(np.full(len(z), rng.normal(), np.float32), position, remaining, prompt)
    assert report(constant, GAMMA)["explained"] <= 1e-9
    assert len(calibration(constant, GAMMA)) == 12
    assert report(Predictions(*np.zeros((4, 0), np.int32)), GAMMA) == {"tokens": 0}
    json.dumps(exact)


def test_predictions_are_of_finished_rollouts_within_the_window():
    rollouts = [rollout(2, 3), rollout(2, 3, finished=False), rollout(1, 70), rollout(90, 2), rollout(1, 80)]
    labels = Labels(GAMMA, window=65, cap=75)
    found = predict(lambda tokens: tokens * 0.5, rollouts, labels, (64, 65), batch_size=2)
    assert found.position.tolist() == [*range(4), *range(65)]
    assert found.remaining.tolist() == [*range(3, -1, -1), *range(70, 5, -1)]
    assert found.z[:4].tolist() == [1.0, 1.5, 2.0, 2.5] and set(found.prompt.tolist()) == {0, 1}
