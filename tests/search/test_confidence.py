"""The paper's three measures: their values, their signs, and what they may not depend on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.testing import assert_close

import headtilt as ht
from headtilt.model.evidence import Evidence
from headtilt.search import confidence as measures
from headtilt.search.confidence import MEASURES, Orbit, curvature_operator, resolve
from tests.toys import curvature_by_hand, evidence_of

GROUPS = {
    "full turn": ht.rotation(),
    "partial turn": ht.rotation(1.0),
    "scale": ht.scale(0.25),
    "shear": ht.shear_x(0.25),
    "translation": ht.translate(0.3, 1.0),
    "the paper's turn": ht.rotation().paper(),
    "the paper's scale": ht.scale(0.25).paper(),
}
every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
bounded = pytest.mark.parametrize(
    "group", [g for g in GROUPS.values() if not g.periodic], ids=[k for k, g in GROUPS.items() if not g.periodic]
)


def group_confidence(energy: torch.Tensor, group, width: float | None = None) -> torch.Tensor:
    return measures.group(evidence_of(energy), Orbit(group, energy.shape[-1]), width=width)


def energies(samples: int, seed: int = 0, *leading: int) -> torch.Tensor:
    return torch.randn(*leading, samples, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- energy -----------------------------------------------------------------------------------------------------------


def test_energy_confidence_is_the_log_of_the_summed_exponentials():
    logits = torch.tensor([[0.0, math.log(2), math.log(3)], [1.0, 1.0, 1.0]], dtype=torch.float64)
    found = measures.energy(Evidence(logits), Orbit(ht.rotation(), 2))
    assert_close(found, torch.tensor([math.log(6), 1 + math.log(3)], dtype=torch.float64))


def test_energy_confidence_is_higher_where_the_model_is_more_familiar():
    faint, strong = torch.tensor([0.1, 0.0, 0.0]), torch.tensor([9.0, 0.0, 0.0])
    found = measures.energy(Evidence(torch.stack([faint, strong])), Orbit(ht.rotation(), 2))
    assert float(found[1]) > float(found[0]) + 5


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_energy_confidence_is_finite_where_exponentials_are_not(size):
    found = measures.energy(Evidence(torch.full((2, 3), size)), Orbit(ht.rotation(), 2))
    assert_close(found, torch.full((2,), size + math.log(3)))
    assert not bool(torch.full((2, 3), size).exp().sum(-1).log().isfinite().all())


# --- bayesian ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probabilities", "bits"),
    [([0.5, 0.5, 0, 0], 1.0), ([0.25] * 4, 2.0), ([1.0, 0, 0, 0], 0.0), ([0.5, 0.25, 0.125, 0.125], 1.75)],
    ids=str,
)
def test_bayesian_confidence_is_the_negative_entropy_in_bits(probabilities, bits):
    """Logits of −inf are probabilities of exactly 0, where p·log p is NaN."""
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    found = measures.bayesian(Evidence(logits), Orbit(ht.rotation(), 1))
    assert_close(found, torch.tensor([-bits], dtype=torch.float64))


def test_bayesian_confidence_has_no_nan_where_probabilities_underflow():
    found = measures.bayesian(Evidence(torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4]])), Orbit(ht.rotation(), 2))
    assert_close(found, torch.tensor([0.0, -math.log2(3)]))


@given(logits=arrays.arrays(np.float64, (3, 5), elements=st.floats(-30, 30)), shift=st.floats(-100, 100))
def test_bayesian_confidence_lies_between_none_and_all_bits_and_ignores_the_energy(logits, shift):
    evidence = Evidence(torch.from_numpy(logits))
    found = measures.bayesian(evidence, Orbit(ht.rotation(), 3))
    assert bool((found <= 1e-12).all())
    assert bool((found >= -math.log2(5) - 1e-12).all())
    shifted = measures.bayesian(Evidence(evidence.logits + shift), Orbit(ht.rotation(), 3))
    assert_close(shifted, found, rtol=0, atol=1e-9)


# --- group: sign ------------------------------------------------------------------------------------------------------


def valley_and_hill(samples: int = 33) -> tuple[torch.Tensor, int, int]:
    """An orbit whose energy has one valley and one hill, equally steep."""
    angles = ht.rotation().grid(samples)
    valley, hill = samples // 4, 3 * samples // 4
    bump = [torch.exp(torch.cos(angles - angles[place]) / 0.1 - 10) for place in (valley, hill)]
    return bump[1] - bump[0], valley, hill


def test_group_confidence_is_highest_in_the_valley_of_the_energy():
    energy, valley, hill = valley_and_hill()
    found = group_confidence(energy, ht.rotation())
    assert int(energy.argmin()) == int(found.argmax()) == valley
    assert int(energy.argmax()) == int(found.argmin()) == hill
    assert float(found[valley]) > 0 > float(found[hill])


def test_the_sign_as_printed_in_the_paper_would_prefer_the_hill():
    energy, valley, hill = valley_and_hill()
    as_printed = -torch.from_numpy(curvature_by_hand(energy.tolist(), ht.rotation()))
    assert int(as_printed.argmax()) == hill
    assert int((-as_printed).argmax()) == valley


@pytest.mark.parametrize("samples", [9, 17, 33])
@every_group
def test_all_three_measures_agree_on_a_valley_in_the_middle(group, samples):
    """A canonical view: low energy, sharp prediction, curved valley."""
    distance = torch.linspace(-1, 1, samples, dtype=torch.float64)
    peak = 6 * torch.exp(-8 * distance**2)
    evidence = Evidence(torch.stack([peak, torch.zeros_like(peak), torch.zeros_like(peak)], dim=-1))
    for measure in MEASURES.values():
        assert int(measure(evidence, Orbit(group, samples)).argmax()) == samples // 2


# --- group: values ----------------------------------------------------------------------------------------------------


@every_group
@given(
    half=st.integers(1, 9),
    values=arrays.arrays(np.float64, (19,), elements=st.floats(-20, 20)),
    share=st.sampled_from([None, 0.02, 0.3, 2.0]),
)
def test_group_confidence_is_what_loops_in_double_precision_give(group, half, values, share):
    samples = 2 * half + 1
    width = None if share is None else share * group.reach
    expected = curvature_by_hand(values[:samples], group, width)
    found = group_confidence(torch.from_numpy(values[:samples].copy()), group, width)
    rounding = 1e-12 * float(curvature_operator(group, samples, width).abs().sum()) * max(np.abs(values).max(), 1)
    assert_close(found, torch.from_numpy(expected), rtol=1e-8, atol=rounding)


@pytest.mark.parametrize("samples", [4, 10, 24])
def test_an_even_number_of_samples_on_a_full_turn_is_no_exception(samples):
    energy = energies(samples)
    expected = torch.from_numpy(curvature_by_hand(energy.tolist(), ht.rotation()))
    assert_close(group_confidence(energy, ht.rotation()), expected, rtol=1e-9, atol=1e-9)


def test_the_curvature_of_a_parabola_of_shears_is_its_second_derivative():
    """For shears ‖T_ĝ − T_ĝ²‖_F is the step itself, so E = 3 t² has confidence 6, smoothed or not."""
    group, samples = ht.shear_x(1.0), 41
    energy = 3 * group.grid(samples) ** 2
    found = group_confidence(energy, group, width=0.05)
    assert_close(found[10:31], torch.full((21,), 6.0, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_cosine_of_a_full_turn_is_scaled_by_smoothing_and_step_length_alone():
    """A cosine is an eigenvector of everything here, so the answer has a closed form."""
    samples, width = 60, 0.3
    angles = ht.rotation().grid(samples)
    step = 2 * math.pi / samples
    found = group_confidence(-torch.cos(3 * angles), ht.rotation(), width)
    smoothing = math.exp(-(3**2) * width**2 / 2)
    difference = 2 * (1 - math.cos(3 * step)) / (2 * (2 * math.sin(step / 2)) ** 2)
    assert_close(found, smoothing * difference * torch.cos(3 * angles), rtol=0, atol=1e-6)


@every_group
def test_the_second_difference_is_divided_by_the_squared_step_length_of_the_generator(group):
    samples, width = 17, 1e-3 * group.reach  # so narrow that nothing is smoothed
    energy = energies(samples)
    generator = group.generator(samples)
    length = torch.linalg.matrix_norm(generator - generator @ generator)
    plain = energy[:-2] - 2 * energy[1:-1] + energy[2:]
    assert_close(group_confidence(energy, group, width)[1:-1], plain / length**2, rtol=1e-9, atol=1e-9)


@every_group
def test_a_constant_energy_has_no_curvature_and_a_constant_shift_changes_none(group):
    assert_close(
        group_confidence(torch.full((17,), 7.0, dtype=torch.float64), group),
        torch.zeros(17).double(),
        rtol=0,
        atol=1e-9,
    )
    energy = energies(17)
    assert_close(group_confidence(energy + 100, group), group_confidence(energy, group), rtol=1e-7, atol=1e-7)


@given(first=st.integers(0, 99), second=st.integers(100, 199), factor=st.floats(-3, 3))
def test_group_confidence_is_linear_in_the_energy(first, second, factor):
    a, b = energies(17, first), energies(17, second)
    together = group_confidence(a + factor * b, ht.scale())
    apart = group_confidence(a, ht.scale()) + factor * group_confidence(b, ht.scale())
    assert_close(together, apart, rtol=1e-7, atol=1e-6)


# --- group: ends ------------------------------------------------------------------------------------------------------


@given(roll=st.integers(-20, 20), samples=st.integers(3, 24))
def test_a_full_turn_wraps_around_so_that_rolling_the_orbit_rolls_the_confidence(roll, samples):
    energy = energies(samples)
    rolled = group_confidence(energy.roll(roll), ht.rotation())
    assert_close(rolled, group_confidence(energy, ht.rotation()).roll(roll), rtol=1e-9, atol=1e-9)


def test_without_wrapping_the_roll_would_be_seen():
    energy, paper = energies(17), ht.rotation().paper()
    rolled = group_confidence(energy.roll(8), paper)
    assert float((rolled - group_confidence(energy, paper).roll(8)).abs().max()) > 0.1


@bounded
@pytest.mark.parametrize("samples", [3, 9, 17])
@pytest.mark.parametrize("share", [None, 0.02, 0.5])
def test_a_linear_energy_scores_nothing_anywhere_also_at_its_ends(group, samples, share):
    """Whichever way it slopes: falling towards an end is no valley."""
    width = None if share is None else share * group.reach
    scale = float(curvature_operator(group, samples, width).abs().max())
    for slope in (2.0, -2.0):
        energy = slope * torch.arange(samples, dtype=torch.float64) + 5
        assert float(group_confidence(energy, group, width).abs().max()) < 1e-9 * samples * scale


@bounded
def test_with_the_paper_padding_a_falling_energy_has_a_kink_at_its_end(group):
    """Half a kernel's height of the slope, where padding twice would have given the slope's larger half."""
    energy = -torch.arange(17, dtype=torch.float64)
    found = measures.group(evidence_of(energy), Orbit(group, 17), border="nearest")
    expected = torch.from_numpy(curvature_by_hand(energy.tolist(), group, border="nearest"))
    assert_close(found, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))
    assert int(found.argmax()) == 16
    named = MEASURES["group-nearest"](evidence_of(energy), Orbit(group, 17))
    assert torch.equal(named, found)


def test_what_lies_beyond_a_full_turn_does_not_depend_on_the_border():
    straight, nearest = (curvature_operator(ht.rotation(), 17, border=border) for border in ("straight", "nearest"))
    assert torch.equal(straight, nearest)


def test_an_unknown_border_is_refused():
    with pytest.raises(ht.OptionError, match="border must be one of"):
        curvature_operator(ht.scale(), 9, border="mirror")


@bounded
def test_an_end_of_an_orbit_wins_only_where_the_energy_is_curved_beside_it(group):
    """A noisy ramp with a valley in the middle: before, one of the ends had the highest score."""
    place = torch.linspace(-1, 1, 17, dtype=torch.float64)
    energy = -6 * place - torch.exp(-20 * place**2)
    assert int(group_confidence(energy, group).argmax()) == 8


@bounded
def test_nothing_leaks_from_one_end_to_the_other(group):
    energy = torch.zeros(17, dtype=torch.float64)
    energy[0] = -5
    assert float(group_confidence(energy, group)[-1]) == pytest.approx(0, abs=1e-9)


def test_a_bounded_valley_seen_from_both_sides_is_symmetric():
    energy = energies(17)
    energy = energy + energy.flip(0)
    found = group_confidence(energy, ht.shear_x())
    assert_close(found, found.flip(0), rtol=1e-9, atol=1e-9)


# --- group: width -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "group", [ht.rotation(), ht.rotation(1.0), ht.shear_x(0.5), ht.scale(0.4)], ids=lambda g: g.name
)
def test_the_same_width_with_twice_the_samples_gives_about_the_same_curve(group):
    """The width is in the group's units, not in samples."""
    few, many = 33, 65 if not group.periodic else 66
    width = group.reach / 5

    def curve(samples: int) -> torch.Tensor:
        return group_confidence(-torch.exp(-20 * (group.grid(samples) / group.reach) ** 2), group, width)

    coarse, fine = curve(few), curve(many)[(many % 2 == 0) : many : 2]
    inner = slice(6, -6)
    scale = float(fine.abs().max())
    assert_close(coarse[inner] / scale, fine[inner] / scale, rtol=0, atol=0.06)


def test_in_samples_instead_the_curve_would_change():
    """What the check above would say of a width of four samples."""
    group = ht.shear_x(0.5)
    peaks = []
    for samples in (33, 65):
        energy = -torch.exp(-20 * (group.grid(samples) / group.reach) ** 2)
        peaks.append(
            float(group_confidence(energy, group, width=4 * float(group.grid(samples)[samples // 2 + 1])).max())
        )
    assert peaks[1] > 1.3 * peaks[0]


def test_the_default_width_is_a_seventh_of_the_reach():
    energy = energies(17)
    for group in GROUPS.values():
        assert_close(group_confidence(energy, group), group_confidence(energy, group, group.reach / 7))


def test_a_wider_kernel_gives_a_flatter_curve():
    energy = energies(33)
    spreads = [float(group_confidence(energy, ht.rotation(), width).std()) for width in (0.1, 0.3, 1.0)]
    assert spreads[0] > 2 * spreads[1] > 4 * spreads[2]


@every_group
def test_the_smoothing_kernel_is_normalised(group):
    """Otherwise a ramp would come out tilted: the interior of a straight line has no curvature."""
    ramp = torch.arange(33, dtype=torch.float64)
    found = group_confidence(ramp, group, width=0.5 * float(group.grid(33)[17]))
    scale = float(curvature_operator(group, 33).abs().max())
    assert float(found[8:-8].abs().max()) < 1e-6 * scale


# --- hypotheses and images are independent ----------------------------------------------------------------------------


@every_group
@given(image=st.integers(0, 2), slot=st.integers(0, 3))
def test_changing_one_orbit_leaves_the_confidence_of_all_others(group, image, slot):
    energy = energies(9, 0, 3, 4)
    changed = energy.clone()
    changed[image, slot] += energies(9, seed=1) * 10
    before, after = group_confidence(energy, group), group_confidence(changed, group)
    others = torch.ones(3, 4, dtype=torch.bool)
    others[image, slot] = False
    assert torch.equal(after[others], before[others])
    assert float((after[image, slot] - before[image, slot]).abs().max()) > 0.1


@pytest.mark.parametrize("name", sorted(MEASURES))
def test_every_measure_treats_each_orbit_alone(name):
    logits = torch.randn(2, 3, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    orbit = Orbit(ht.rotation(), 9)
    together = MEASURES[name](Evidence(logits), orbit)
    assert together.shape == (2, 3, 9)
    for image in range(2):
        for slot in range(3):
            alone = MEASURES[name](Evidence(logits[image, slot]), orbit)
            assert_close(together[image, slot], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(MEASURES))
def test_confidence_keeps_the_dtype_of_the_logits(name, dtype):
    assert MEASURES[name](Evidence(torch.zeros(2, 5, 3, dtype=dtype)), Orbit(ht.rotation(), 5)).dtype == dtype


# --- reflection and resolution ----------------------------------------------------------------------------------------


def test_on_reflections_group_confidence_is_the_negative_energy():
    evidence = Evidence(torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(measures.group(evidence, Orbit(ht.reflection(), 4)), -evidence.energy)


def test_names_and_callables_resolve_to_measures():
    evidence, orbit = evidence_of(energies(9)), Orbit(ht.rotation(), 9)
    for name, measure in MEASURES.items():
        assert torch.equal(resolve(name)(evidence, orbit), measure(evidence, orbit))
    wide = resolve("group", 1.0)(evidence, orbit)
    assert torch.equal(wide, measures.group(evidence, orbit, width=1.0))
    bounded_orbit = Orbit(ht.scale(), 9)
    nearest = resolve("group-nearest", 0.1)(evidence, bounded_orbit)
    assert torch.equal(nearest, measures.group(evidence, bounded_orbit, width=0.1, border="nearest"))
    assert resolve(measures.energy) is measures.energy
    assert set(MEASURES) == {"energy", "bayesian", "group", "group-nearest", "multilabel"}
