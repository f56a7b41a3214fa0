"""Fading laws: power, correlation, prefixes, files."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.support.errors import InputError
from wflmc.support.recursion import first_order

from .error_tools import raises_input_error

ROUNDS = 4000
DEVICES = 200


def gains(fading, seed=0, rounds=ROUNDS, devices=DEVICES):
    return wflmc.Link(fading, seed=seed).gains(rounds, devices)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("rician_k", [0.0, 3.0])
def test_mean_power_does_not_depend_on_correlation(correlation, rician_k):
    h = gains(channel.rician(power=0.01, rician_k=rician_k, correlation=correlation))
    power = np.abs(h) ** 2
    # Samples along a device are correlated; devices are independent, so their means give the standard error.
    per_device = power.mean(0)
    error = per_device.std(ddof=1) / np.sqrt(DEVICES)
    assert abs(per_device.mean() - 0.01) < 4 * error
    assert error < 0.01 * 0.01
    first, last = power[0].mean(), power[-1].mean()
    spread = power[0].std(ddof=1) / np.sqrt(DEVICES)
    assert abs(first - 0.01) < 4 * spread
    assert abs(last - 0.01) < 4 * spread


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_correlation_of_successive_rounds(correlation):
    h = gains(channel.rayleigh(power=2.0, correlation=correlation))
    for lag in (1, 2):
        products = (h[lag:] * h[:-lag].conj()).mean(0) / 2.0
        error = products.real.std(ddof=1) / np.sqrt(DEVICES)
        assert abs(products.real.mean() - correlation**lag) < 4 * error
        assert abs(products.imag.mean()) < 4 * products.imag.std(ddof=1) / np.sqrt(
            DEVICES
        )


def test_full_correlation_is_a_static_channel():
    h = gains(channel.rayleigh(correlation=1.0), rounds=50)
    np.testing.assert_array_equal(h, np.broadcast_to(h[0], h.shape))
    assert np.unique(np.abs(h[0])).size == DEVICES


def test_rayleigh_is_circular_gaussian():
    h = gains(channel.rayleigh(power=1.0)).ravel()
    # |h|² of CN(0,1) is Exp(1): P(|h|² > 1) = 1/e, with a binomial standard error.
    fraction = np.mean(np.abs(h) ** 2 > 1)
    expected = np.exp(-1)
    assert abs(fraction - expected) < 4 * np.sqrt(expected * (1 - expected) / h.size)
    assert abs(np.mean(h**2)) < 4 * np.sqrt(2 / h.size)


def test_rician_k():
    """K is the power of the mean over the power of what varies."""
    h = gains(channel.rician(power=1.0, rician_k=3.0))
    assert abs(h.mean()) ** 2 == pytest.approx(0.75, abs=4e-3)
    assert np.var(h) == pytest.approx(0.25, abs=2e-3)


def test_power_per_device():
    h = gains(channel.rayleigh(power=[1.0, 0.01]), rounds=20_000, devices=2)
    np.testing.assert_allclose(
        (np.abs(h) ** 2).mean(0), [1.0, 0.01], rtol=4 / np.sqrt(20_000)
    )
    np.testing.assert_allclose(
        gains(channel.static([4.0, 9.0]), rounds=2, devices=2), [[2, 3], [2, 3]]
    )


@pytest.mark.parametrize(
    "fading", [channel.rayleigh(correlation=0.7), channel.rician(), channel.static()]
)
def test_more_rounds_begin_with_the_same_ones(fading):
    np.testing.assert_array_equal(
        gains(fading, rounds=30), gains(fading, rounds=80)[:30]
    )
    if fading.name != "static":
        assert not np.allclose(
            gains(fading, seed=1, rounds=30), gains(fading, rounds=30)
        )


def test_gains_from_an_array():
    table = np.arange(1, 13).reshape(6, 2) * (1 + 1j)
    np.testing.assert_array_equal(
        gains(channel.from_array(table), rounds=4, devices=2), table[:4]
    )


@pytest.mark.parametrize(
    ("table", "facts"),
    [
        (np.ones(5), ("float64", "(5,)")),
        (np.zeros((5, 2)), ("0 for device 0", "round 0", "10")),
        (np.full((5, 2), np.nan), ("nan for device 0", "round 0", "10")),
        (np.ones((3, 2)), ("(3, 2)", "5 rounds")),
        (np.ones((5, 3)), ("(5, 3)", "2 devices")),
        (np.array([["a", "b"]]), ("<U1", "(1, 2)")),
    ],
)
def test_bad_gains(table, facts):
    with raises_input_error("gains", *facts, section="link"):
        gains(channel.from_array(table), rounds=5, devices=2)


@pytest.mark.parametrize("kind", [float, complex])
def test_a_dead_channel_is_named(kind):
    table = np.ones((9, 8), dtype=kind)
    table[4, 7] = 0
    with raises_input_error("gains", "device 7", "round 4"):
        channel.from_array(table)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: channel.rayleigh(correlation=1.5), "correlation"),
        (lambda: channel.rician(rician_k=-1), "rician_k"),
        (lambda: gains(channel.static([1.0, 2.0, 3.0]), devices=2), "power"),
        (lambda: gains(channel.static(-1.0)), "power"),
        (lambda: wflmc.Link(channel.static(), snr_db=np.inf), "snr_db"),
        (lambda: wflmc.Link(channel.static(), noise_power=0), "noise_power"),
    ],
)
def test_bad_links(make, key):
    with pytest.raises(wflmc.InputError) as caught:
        make()
    assert caught.value.key == key


def test_superposition_noise():
    y = jax.vmap(
        lambda key: channel.superpose(key, jnp.full(3, 5.0), jnp.float32(4.0))
    )(jax.random.split(jax.random.key(0), 40_000))
    y = np.asarray(y, dtype=float)
    np.testing.assert_allclose(y.mean(0), 5.0, atol=4 * 2 / np.sqrt(40_000))
    np.testing.assert_allclose(y.var(0), 4.0, atol=4 * 4 * np.sqrt(2 / 40_000))


def test_first_order_recursion_against_a_loop():
    generator = np.random.default_rng(0)
    for factor in (0.0, 0.3, 0.999, 1.0):
        steps = generator.standard_normal((50, 3)) + 1j * generator.standard_normal(
            (50, 3)
        )
        value = np.full(3, 2.0 + 0j)
        expected = []
        for row in steps:
            value = factor * value + row
            expected.append(value)
        np.testing.assert_allclose(
            first_order(steps, factor, 2.0), expected, rtol=1e-12
        )


@pytest.mark.parametrize("seed", [3.7, -1, 2**32, "3", np.float64(2.0)])
def test_seeds_that_are_no_whole_numbers_of_32_bits_are_refused(seed):
    with raises_input_error("seed", 4294967295, section="link"):
        wflmc.Link(channel.rayleigh(1.0), 20, seed=seed)


ANTENNAS = 4


@pytest.fixture
def array():
    """h[round, antenna, device] of a server with several antennas."""
    return complex_gains(np.random.default_rng(0), 5, ANTENNAS, 6)


def complex_gains(generator, *shape):
    return generator.standard_normal(shape) + 1j * generator.standard_normal(shape)


def loss_of(statistic, change, covariance):
    """μ²/2 of telling apart two Gaussian laws of a complex vector, seen through a matrix, by real arithmetic."""

    def real(matrix):
        return np.block([[matrix.real, -matrix.imag], [matrix.imag, matrix.real]])

    seen = real(statistic)
    difference = seen @ np.concatenate([change.real, change.imag])
    noise = seen @ (real(covariance) / 2) @ seen.T  # half of the power in each part
    return 0.5 * difference @ np.linalg.solve(noise, difference)


def test_all_antennas_tell_more_than_a_beam(array):
    """The loss of the whole vector over that of the beam's output, by the covariance of each."""
    generator = np.random.default_rng(1)
    weights = complex_gains(generator, len(array), ANTENNAS)
    noise_power = 0.7
    change = 0.3 - 0.2j
    factor = channel.beam_loss_factor(array, weights)
    assert factor.shape == (5, 6)
    for (s, k), power_ratio in np.ndenumerate(factor):
        moved = array[s, :, k] * change
        covariance = noise_power * np.eye(ANTENNAS, dtype=complex)
        whole = loss_of(np.eye(ANTENNAS, dtype=complex), moved, covariance)
        beam = loss_of(weights[s].conj()[None], moved, covariance)
        matched = loss_of(array[s, :, k].conj()[None], moved, covariance)
        np.testing.assert_allclose(whole, np.sum(np.abs(moved) ** 2) / noise_power)
        np.testing.assert_allclose(matched, whole)  # h_kᴴ y is sufficient
        np.testing.assert_allclose(whole / beam, power_ratio)
    assert np.all(factor >= 1)


def test_a_server_tells_neighbours_apart_by_all_antennas(array):
    """Simulated receptions: the best test of a beam's output is as good as its loss says, that of y is better."""
    h = array[0, :, 0]
    weights = np.ones(ANTENNAS)
    draws = 200_000
    noise_power = 40.0
    n = complex_gains(np.random.default_rng(2), draws, ANTENNAS) * np.sqrt(
        noise_power / 2
    )
    both = [h * x + n for x in (0.0, 1.0)]
    losses = []
    for f in (h, weights):  # the matched filter, and the beam
        phase = np.conj(np.vdot(f, h)) / np.abs(np.vdot(f, h))
        silent, transmitting = ((y @ f.conj() * phase).real for y in both)
        losses.append((transmitting.mean() - silent.mean()) ** 2 / (2 * silent.var()))
    np.testing.assert_allclose(
        losses[0], np.sum(np.abs(h) ** 2) / noise_power, rtol=0.02
    )
    np.testing.assert_allclose(
        losses[0] / losses[1],
        channel.beam_loss_factor(array[:1], weights)[0, 0],
        rtol=0.02,
    )


def test_a_beam_that_points_at_a_device_tells_all_of_it(array):
    np.testing.assert_allclose(
        channel.beam_loss_factor(array[:1], array[0, :, 2])[0, 2], 1.0
    )
    single = channel.beam_loss_factor(array[:, :1], [2.0])
    np.testing.assert_allclose(single, 1.0)


def test_gains_of_several_antennas_are_refused_with_what_to_do(array):
    with raises_input_error("gains", "antenna"):
        channel.from_array(array)
    for gains, weights, key in (
        (array[0], np.ones(ANTENNAS), "gains"),
        (array, np.ones(3), "weights"),
        (array, np.zeros(ANTENNAS), "weights"),
        (array, np.full(ANTENNAS, np.nan), "weights"),
    ):
        with pytest.raises(InputError) as caught:
            channel.beam_loss_factor(gains, weights)
        assert caught.value.key == key
